"""Reads complete commands of OpenRLHF and verl, with the launcher and the program in front of the options."""

PROVIDES = {"command line": {"pasted": "programs:with_program_as_option"}}
