"""Program in the form of the guide "Multi-Role Training (OpenRLHF)"."""
