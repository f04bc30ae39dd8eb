"""What a plan would be like if something were different."""
