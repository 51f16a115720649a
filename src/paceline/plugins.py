"""What packages that extend Paceline import: see docs/plugins.md.

`paceline` itself has the rest: `Task`, `Callback`, `World`.
"""

from paceline.config.settings import OptimSettings as OptimSettings
from paceline.observe.loggers import PointLogger as PointLogger
from paceline.optim.schedule import Schedule as Schedule
from paceline.optim.schedule import Span as Span
