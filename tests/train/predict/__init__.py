"""Tests of `paceline predict`."""
