"""The accuracy lab: tasks, the runner that puts every policy through the same samples, tables and plots.

Stands on top: nothing but the command line imports it. Importing this package is cheap.
"""

from __future__ import annotations
