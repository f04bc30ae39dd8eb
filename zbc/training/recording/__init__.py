"""Recording of a rank's ops and memory over time."""
