"""What belongs to the book: figures, checks, widgets, small machines; no core room uses it."""
