"""A plugin of each kind for Paceline."""
