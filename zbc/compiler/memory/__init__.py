"""What every rank holds, and when."""
