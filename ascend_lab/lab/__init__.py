"""What belongs to the book: its figures, checks, widgets and small machines; no core room uses it."""
