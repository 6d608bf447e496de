"""A vision tower and what connects it to a text model: plain weights, whatever the text is stored as."""
