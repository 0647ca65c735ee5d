"""What people look at: figures, panels and the report."""
