"""ipywidgets panels, one file per notebook, and the thread-correct parts that they are made of."""
