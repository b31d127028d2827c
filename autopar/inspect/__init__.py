"""Plans and runs as people read them: text, pages, traces."""
