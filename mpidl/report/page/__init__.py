"""Write one HTML page about one or more runs."""
