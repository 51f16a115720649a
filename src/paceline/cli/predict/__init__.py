"""`paceline predict`: speed on other numbers of ranks, before anybody rents them."""
