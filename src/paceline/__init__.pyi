"""Public names of Paceline: the one table of them, for type checkers, editors and the loader in `__init__.py`."""

from paceline.config.settings import TrainConfig as TrainConfig
from paceline.core.errors import PacelineError as PacelineError
from paceline.data.collate import pad_collate as pad_collate
from paceline.data.grain import Batch as Batch
from paceline.data.grain import Grain as Grain
from paceline.data.packed.dataset import PackedDataset as PackedDataset
from paceline.lab.compare.command import compare as compare
from paceline.lab.compare.comparison import Comparison as Comparison
from paceline.lab.predict.api import predict as predict
from paceline.lab.predict.prediction import Prediction as Prediction
from paceline.lab.sweep.api import sweep as sweep
from paceline.lab.sweep.outcome import SweepResult as SweepResult
from paceline.observe.callback import Callback as Callback
from paceline.observe.callback import Watcher as Watcher
from paceline.train.averaged import Averaged as Averaged
from paceline.train.averaged import average as average
from paceline.train.engine import Engine as Engine
from paceline.train.fit import fit as fit
from paceline.train.load import load as load
from paceline.train.metrics import Gathered as Gathered
from paceline.train.result import Result as Result
from paceline.train.task import Accelerates as Accelerates
from paceline.train.task import Exports as Exports
from paceline.train.task import HasLengths as HasLengths
from paceline.train.task import HasStages as HasStages
from paceline.train.task import ReadsInputs as ReadsInputs
from paceline.train.task import ReadsModels as ReadsModels
from paceline.train.task import ReadsWeights as ReadsWeights
from paceline.train.task import Recordable as Recordable
from paceline.train.task import Reports as Reports
from paceline.train.task import SavesState as SavesState
from paceline.train.task import ShowsSamples as ShowsSamples
from paceline.train.task import Stage as Stage
from paceline.train.task import StepsSchedulers as StepsSchedulers
from paceline.train.task import StreamsInputs as StreamsInputs
from paceline.train.task import Task as Task
from paceline.world.discover.environment import World as World

__all__: list[str]
__version__: str
