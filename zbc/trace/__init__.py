"""Files of recorded runs."""
