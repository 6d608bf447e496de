"""The page that every report is written into: markup, style, and the script that sorts and filters."""
