// A policy at the trainer: each operation takes the next seq, is acknowledged once logged, and ends later.

import { randomUUID } from "node:crypto";

import { TrainSample } from "../gen/opentinkerapi/data/v1/train_sample.js";
import {
  OperationHeader,
  OperationState,
  type Operation,
} from "../gen/opentinkerapi/trainer/v1/operation.js";
import {
  CreatePolicyRequest,
  ForwardBackwardRequest,
  GetOperationRequest,
  OptimStepRequest,
  PublishWeightsRequest,
  TrainerServiceClient,
} from "../gen/opentinkerapi/trainer/v1/trainer_service.js";
import { deadline, insecure, metadata, unary, type Connection } from "./calls.js";
import { packIds } from "./wire.js";

export class Policy {
  private seq = 0;

  private constructor(
    readonly name: string,
    private readonly trainer: TrainerServiceClient,
    private readonly connection: Connection,
    private readonly attempt: string,
  ) {}

  static async create(
    endpoint: { address: string; attempt: string },
    connection: Connection,
    job: string,
    baseModel: string,
  ): Promise<Policy> {
    const trainer = new TrainerServiceClient(endpoint.address, insecure);
    const request = CreatePolicyRequest.fromPartial({
      requestId: randomUUID(),
      job,
      attempt: endpoint.attempt,
      baseModel,
      tuning: { kind: { $case: "lora", value: { rank: 4, alpha: 8, targetModules: [] } } },
      seed: "7",
    });
    const response = await unary<{ policy?: { name: string } | undefined }>((done) =>
      trainer.createPolicy(request, metadata(connection), deadline(), done),
    );
    if (!response.policy) throw new Error("CreatePolicy returned no policy");
    return new Policy(response.policy.name, trainer, connection, endpoint.attempt);
  }

  // Adds the gradient of the mean negative logprob of every token but the first; returns the operation's seq.
  async crossEntropy(rows: readonly (readonly number[])[]): Promise<string> {
    const tokens = rows.reduce((sum, row) => sum + row.length - 1, 0);
    const header = this.nextHeader();
    const samples = rows.map((row) =>
      TrainSample.fromPartial({
        chunks: [{ chunk: { $case: "tokens", value: { tokenIds: packIds(row) } } }],
        lossMask: Buffer.from(row.map((_, i) => (i === 0 ? 0 : 1))),
      }),
    );
    await unary((done) => {
      const call = this.trainer.forwardBackward(metadata(this.connection), deadline(), done);
      const start = {
        header,
        chunkCount: 1,
        losses: [
          {
            name: "cross_entropy",
            loss: { $case: "crossEntropy" as const, value: {} },
            normalization: { $case: "denominator" as const, value: tokens },
          },
        ],
      };
      call.write(ForwardBackwardRequest.fromPartial({ part: { $case: "start", value: start } }));
      call.write(ForwardBackwardRequest.fromPartial({ part: { $case: "chunk", value: { index: 0, samples } } }));
      call.end();
    });
    return header.seq;
  }

  async optimStep(forwardBackwardSeqs: string[], learningRate: number): Promise<string> {
    const header = this.nextHeader();
    const request = OptimStepRequest.fromPartial({ header, forwardBackwardSeqs, adamw: { learningRate }, clipNorm: 1 });
    await unary((done) => this.trainer.optimStep(request, metadata(this.connection), deadline(), done));
    return header.seq;
  }

  async publish(): Promise<string> {
    const header = this.nextHeader();
    const request = PublishWeightsRequest.fromPartial({ header });
    await unary((done) => this.trainer.publishWeights(request, metadata(this.connection), deadline(), done));
    return header.seq;
  }

  // Waits until the operation has ended; throws if it failed.
  async result(seq: string): Promise<NonNullable<Operation["result"]>> {
    const request = GetOperationRequest.fromPartial({ policy: this.name, seq, wait: { seconds: "20" } });
    for (;;) {
      const { operation } = await unary<{ operation?: Operation | undefined }>((done) =>
        this.trainer.getOperation(request, metadata(this.connection), deadline(), done),
      );
      if (operation?.state === OperationState.OPERATION_STATE_FAILED) {
        throw new Error(`operation ${seq} failed: ${operation.error?.message}`);
      }
      if (operation?.state === OperationState.OPERATION_STATE_DONE && operation.result) return operation.result;
    }
  }

  close(): void {
    this.trainer.close();
  }

  private nextHeader(): OperationHeader {
    this.seq += 1;
    return OperationHeader.fromPartial({
      policy: this.name,
      seq: String(this.seq),
      requestId: randomUUID(),
      attempt: this.attempt,
      ackedSeq: "0",
    });
  }
}
