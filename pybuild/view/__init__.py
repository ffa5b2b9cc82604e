"""What a build shows of itself: while it runs, at its end, and later."""
