// Completions and scores of named policy versions.

import { randomUUID } from "node:crypto";

import {
  AckCompletionsRequest,
  InferenceServiceClient,
  SampleRequest,
  ScoreTokensRequest,
  TokenizeRequest,
  type ScoreTokensResponse,
  type TokenizeResponse,
} from "../gen/opentinkerapi/inference/v1/inference_service.js";
import { ModelRef, type Completion } from "../gen/opentinkerapi/inference/v1/sampling.js";
import { deadline, insecure, metadata, streamed, unary, type Connection } from "./calls.js";
import { packIds, unpackFloats, unpackIds } from "./wire.js";

export class Sampler {
  private readonly inference: InferenceServiceClient;

  constructor(
    private readonly endpoint: { address: string; attempt: string },
    private readonly connection: Connection,
  ) {
    this.inference = new InferenceServiceClient(endpoint.address, insecure);
  }

  async tokenize(text: string): Promise<number[]> {
    const request = TokenizeRequest.fromPartial({ text });
    const response = await unary<TokenizeResponse>((done) =>
      this.inference.tokenize(request, metadata(this.connection), deadline(), done),
    );
    return unpackIds(response.tokenIds);
  }

  async sample(policy: string, version: string, prompt: readonly number[], maxTokens: number): Promise<Completion[]> {
    const request = SampleRequest.fromPartial({
      requestId: randomUUID(),
      model: modelRef(policy, version),
      prompt: { chunks: [{ chunk: { $case: "tokens", value: { tokenIds: packIds(prompt) } } }] },
      params: { maxTokens, temperature: 1, seed: "11", ignoreEos: true },
      n: 2,
      attempt: this.endpoint.attempt,
      jobToken: this.connection.jobToken,
    });
    const completions: Completion[] = [];
    for await (const response of streamed(this.inference.sample(request, metadata(this.connection), deadline()))) {
      if (response.event?.$case === "completion") completions.push(response.event.value);
    }
    const received = AckCompletionsRequest.fromPartial({ requestIds: [request.requestId] });
    await unary((done) => this.inference.ackCompletions(received, metadata(this.connection), deadline(), done));
    return completions;
  }

  // Sum of the logprobs of every token but the first, under one version.
  async logprob(policy: string, version: string, row: readonly number[]): Promise<number> {
    const request = ScoreTokensRequest.fromPartial({
      model: modelRef(policy, version),
      sequences: [{ chunks: [{ chunk: { $case: "tokens", value: { tokenIds: packIds(row) } } }] }],
      attempt: this.endpoint.attempt,
      jobToken: this.connection.jobToken,
    });
    const response = await unary<ScoreTokensResponse>((done) =>
      this.inference.scoreTokens(request, metadata(this.connection), deadline(), done),
    );
    const [scores] = response.scores;
    if (!scores) throw new Error("ScoreTokens returned no scores");
    return unpackFloats(scores.logprobs)
      .slice(1)
      .reduce((sum, logprob) => sum + logprob, 0);
  }

  close(): void {
    this.inference.close();
  }
}

function modelRef(policy: string, version: string): ModelRef {
  return ModelRef.fromPartial({ model: { $case: "policyVersion", value: { policy, version } } });
}
