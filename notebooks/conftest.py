"""Notebooks run by pytest take small sizes; opened in Jupyter, full ones."""

import os

os.environ["NUMBA_MLA_NOTEBOOK_SIZES"] = "small"
