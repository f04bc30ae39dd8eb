"""How the processes of a run begin, find each other and end."""
