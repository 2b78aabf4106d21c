"""What a simulated layer looks like: tables, timelines, page, trace."""
