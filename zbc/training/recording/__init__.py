"""What a rank did and held, and when."""
