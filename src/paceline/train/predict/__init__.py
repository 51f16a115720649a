"""Prediction of speed on other numbers of ranks and other links: `paceline predict`."""
