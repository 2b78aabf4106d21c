"""Documents, packed rows, and their assignment to data-parallel replicas.  NumPy only."""

from mindspeed_cp.data.balance import Assignment, assign
from mindspeed_cp.data.byte_tokenizer import EOD, VOCAB_SIZE, detokenize, tokenize
from mindspeed_cp.data.contents import corpus_digests, different_documents
from mindspeed_cp.data.corpus import Corpus, check_learnable, open_corpus
from mindspeed_cp.data.dispatch import DispatchedBatch, Dispatcher
from mindspeed_cp.data.document_cost import DocumentCost
from mindspeed_cp.data.file_corpus import FileCorpus
from mindspeed_cp.data.packing import Packer
from mindspeed_cp.data.pool import PoolModel
from mindspeed_cp.data.rollouts import ROLLOUTS, Rollouts, RolloutShape
from mindspeed_cp.data.stream import PackedRow, PackedStream, ReplicaBatch
from mindspeed_cp.data.trajectory_corpus import TrajectoryCorpus, open_trajectories
from mindspeed_cp.data.trajectory_lines import TrajectoryFiles, TrajectoryGroup
from mindspeed_cp.data.tree_stream import TreeRow, TreeStream, open_stream

__all__ = [
    "EOD",
    "ROLLOUTS",
    "VOCAB_SIZE",
    "Assignment",
    "Corpus",
    "DispatchedBatch",
    "Dispatcher",
    "DocumentCost",
    "FileCorpus",
    "PackedRow",
    "PackedStream",
    "Packer",
    "PoolModel",
    "ReplicaBatch",
    "RolloutShape",
    "Rollouts",
    "TrajectoryCorpus",
    "TrajectoryFiles",
    "TrajectoryGroup",
    "TreeRow",
    "TreeStream",
    "assign",
    "check_learnable",
    "corpus_digests",
    "detokenize",
    "different_documents",
    "open_corpus",
    "open_stream",
    "open_trajectories",
    "tokenize",
]
