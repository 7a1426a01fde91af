"""Pictures: curves of runs and maps of attention; matplotlib is imported when the first one is drawn."""
