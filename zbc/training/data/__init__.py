"""What a step trains on."""
