import pickle

import pytest
import torch

from components.engines.cuda_ipc import CudaBuckets, export_buckets, gpu_uuid, import_buckets


def test_weights_that_are_on_no_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['a'\]"):
        export_buckets([("a", torch.zeros(2))])


def test_a_handle_crosses_without_the_memory() -> None:
    assert pickle.loads(pickle.dumps(CudaBuckets([], [torch.zeros(2)]))).flats == []
    assert list(import_buckets(export_buckets([]))) == []


def test_the_gpu_of_a_process_is_named_or_empty() -> None:
    assert bool(gpu_uuid()) == torch.cuda.is_available()
