"""The Go code generated from the protos builds, with Debian's toolchain and libraries."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROTOS = Path(__file__).resolve().parents[2] / "protos"
TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
DEBIAN = (
    "apt-get install golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev "
    "protobuf-compiler protoc-gen-go protoc-gen-go-grpc"
)
LIBRARIES = Path("/usr/share/gocode")

# Uses what was generated: a request with an enum, a nested message and a repeated field survives the wire.
PROGRAM = """
package main

import (
	"fmt"

	pb "opentinker.dev/api/scheduler/v1"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

func main() {
	var client func(grpc.ClientConnInterface) pb.SchedulerServiceClient = pb.NewSchedulerServiceClient
	request := &pb.ListJobsRequest{PageSize: 7, States: []pb.JobState{pb.JobState_JOB_STATE_RUNNING}}
	data, err := proto.Marshal(request)
	if err != nil || client == nil {
		panic(err)
	}
	copied := &pb.ListJobsRequest{}
	if err := proto.Unmarshal(data, copied); err != nil {
		panic(err)
	}
	fmt.Println(proto.Equal(request, copied), copied.States[0])
}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generated_go_code_builds(tmp_path: Path) -> None:
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    assert not absent, f"{absent} not found; on Debian: {DEBIAN}"
    assert LIBRARIES.exists(), f"no Go libraries in {LIBRARIES}; on Debian: {DEBIAN}"
    source = tmp_path / "src"
    source.mkdir()
    files = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "opentinkerapi").rglob("*.proto"))
    roots = [f"--proto_path={PROTOS}", f"--proto_path={PROTOS / 'third_party'}"]
    run(["protoc", *roots, f"--go_out={source}", f"--go-grpc_out={source}", *files])
    program = source / "main"
    program.mkdir()
    (program / "main.go").write_text(PROGRAM)
    environment = os.environ | {
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "GOPATH": f"{tmp_path}:{LIBRARIES}",
        "GOPROXY": "off",
    }
    run(["go", "build", "opentinker.dev/..."], environment)
    run(["go", "vet", "opentinker.dev/...", "main"], environment)
    assert run(["go", "run", "main"], environment) == "true JOB_STATE_RUNNING\n"


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{' '.join(command[:3])}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
