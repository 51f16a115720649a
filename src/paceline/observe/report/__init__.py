"""One page that says how runs went: read a run's files, make figures and texts of them, put them into one HTML file."""
