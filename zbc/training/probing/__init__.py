"""What the layers of a user do, found out before training starts."""
