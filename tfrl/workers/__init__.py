"""The processes of a run: how they meet, compute together and are watched."""
