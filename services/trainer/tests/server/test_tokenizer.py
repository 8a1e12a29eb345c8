"""The tokenizer of the base model, for jobs without an inference slot."""

import grpc
import grpc.aio
import pytest
from services.trainer.tests.server.harness import Client, pb

from opentinkerapi.runtime.errors import from_rpc_error
from opentinkerapi.runtime.reasons import Reason


async def test_a_model_without_files_has_an_empty_list_and_no_file(noop: Client) -> None:
    """The no-op engine has no model; with files, tests/e2e/test_sft.py renders by them."""
    (listing,) = [part async for part in noop.stub.GetTokenizer(pb.GetTokenizerRequest())]
    assert len(listing.digest) == 64
    assert not listing.files
    call = noop.stub.GetTokenizer(pb.GetTokenizerRequest(sha256s=["0" * 64]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(call))
    assert from_rpc_error(refused.value).reason == Reason.TOKENIZER_NOT_FOUND
