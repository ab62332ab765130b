"""The report as one HTML file, from the same pages as the tab."""
