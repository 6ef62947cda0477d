"""Layout of a job on its nodes, computed before it starts, for the plan that a command prints."""

PROVIDES = {"node layout": {"nodes": "layout:nodes_of", "lines": "layout:node_lines"}}
