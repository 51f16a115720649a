"""Report of runs: read their folders, make figures and texts of them, put them into one HTML file."""
