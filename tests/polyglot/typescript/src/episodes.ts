// Plays episodes of a hosted environment, by a call each and over one Drive stream, and prints what came of them.
//
//   node build/src/episodes.js --address HOST:PORT --environment NAME --seed N --options JSON --actions JSON
//
// Prints one JSON object: what each way of playing saw, and what a wrong call and an unknown environment
// were answered with.

import { randomUUID } from "node:crypto";
import { parseArgs } from "node:util";

import { EndReason, RewardStatus } from "../gen/opentinkerapi/data/v1/trajectory.js";
import {
  BeginRequest,
  CloseEpisodesRequest,
  DriveRequest,
  EnvHostServiceClient,
  FinalizeRequest,
  OpenGroupRequest,
  StepRequest,
  type BeginResponse,
  type CloseEpisodesResponse,
  type DriveReply,
  type DriveResponse,
  type FinalizeResponse,
  type OpenGroupResponse,
  type StepResponse,
} from "../gen/opentinkerapi/env/v1/env_host_service.js";
import type { AgentObservation, AgentReward } from "../gen/opentinkerapi/env/v1/environment.js";
import { CallError, deadline, errorOf, insecure, metadata, unary, type Connection } from "./calls.js";

const { values } = parseArgs({
  options: {
    address: { type: "string" },
    environment: { type: "string" },
    seed: { type: "string", default: "0" },
    options: { type: "string", default: "" },
    actions: { type: "string", default: "[]" },
  },
});
if (!values.address || !values.environment) {
  throw new Error("usage: episodes.js --address HOST:PORT --environment NAME [--seed N] [--options JSON] [--actions JSON]");
}
const actions: string[] = JSON.parse(values.actions);
const host = new EnvHostServiceClient(values.address, insecure);
const nobody: Connection = { key: "", jobToken: "" };

type Call = NonNullable<DriveRequest["calls"][number]["call"]>;
type Reply = Exclude<NonNullable<DriveReply["reply"]>, { $case: "error" }>;
type Ask = (call: Call) => Promise<Reply>;

async function openGroup(environment: string, size: number): Promise<string[]> {
  const request = OpenGroupRequest.fromPartial({
    requestId: randomUUID(),
    environment: `environments/${environment}`,
    size,
    seed: values.seed,
    optionsJson: values.options,
  });
  const { episodes } = await unary<OpenGroupResponse>((done) =>
    host.openGroup(request, metadata(nobody), deadline(), done),
  );
  return episodes;
}

// One call by itself.
const alone: Ask = async (call) => {
  switch (call.$case) {
    case "begin":
      return {
        $case: "begin",
        value: await unary<BeginResponse>((done) => host.begin(call.value, metadata(nobody), deadline(), done)),
      };
    case "step":
      return {
        $case: "step",
        value: await unary<StepResponse>((done) => host.step(call.value, metadata(nobody), deadline(), done)),
      };
    case "finalize":
      return {
        $case: "finalize",
        value: await unary<FinalizeResponse>((done) => host.finalize(call.value, metadata(nobody), deadline(), done)),
      };
  }
};

// Many calls over one stream; replies come in no order, each with the id of its call.
class Stream {
  private readonly call = host.drive(metadata(nobody), deadline());
  private readonly waiting = new Map<string, { resolve: (reply: Reply) => void; reject: (error: Error) => void }>();
  private lastId = 0;

  constructor() {
    this.call.on("data", ({ replies }: DriveResponse) => replies.forEach((reply) => this.take(reply)));
    this.call.on("error", (error) => this.waiting.forEach(({ reject }) => reject(error)));
  }

  readonly ask: Ask = (call) => {
    const callId = String(++this.lastId);
    return new Promise((resolve, reject) => {
      this.waiting.set(callId, { resolve, reject });
      this.call.write(DriveRequest.fromPartial({ calls: [{ callId, call }] }));
    });
  };

  end(): void {
    this.call.end();
  }

  private take({ callId, reply }: DriveReply): void {
    const asked = this.waiting.get(callId);
    this.waiting.delete(callId);
    if (!asked || !reply) return;
    if (reply.$case === "error") asked.reject(errorOf(reply.value));
    else asked.resolve(reply);
  }
}

function texts(pending: readonly AgentObservation[]): string[] {
  return pending.map(({ observation }) => {
    const shown = observation?.observation;
    const contents = shown?.$case === "chat" ? shown.value.messages.map((message) => message.content) : [shown?.value];
    return contents
      .flatMap((content) => content?.parts ?? [])
      .map(({ part }) => (part?.$case === "text" || part?.$case === "json" ? part.value : ""))
      .join("");
  });
}

// A reward that is missing is null, which is not 0.
function rewards(given: readonly AgentReward[]): { value: number | null; status: string }[] {
  return given.map(({ reward }) => ({
    value: reward?.value ?? null,
    status: RewardStatus[reward?.status ?? RewardStatus.REWARD_STATUS_UNSPECIFIED]!,
  }));
}

async function play(episode: string, ask: Ask): Promise<unknown> {
  const first = await ask({ $case: "begin", value: BeginRequest.fromPartial({ episode }) });
  if (first.$case !== "begin") throw new Error(`an answer to begin is ${first.$case}`);
  const seen = [{ texts: texts(first.value.pending), rewards: rewards([]) }];
  for (const [index, text] of actions.entries()) {
    const content = { parts: [{ part: { $case: "text" as const, value: text } }] };
    const request = { episode, seq: String(index + 1), actions: [{ agent: "agent", action: { content } }] };
    const step = await ask({ $case: "step", value: StepRequest.fromPartial(request) });
    if (step.$case !== "step") throw new Error(`an answer to step is ${step.$case}`);
    seen.push({ texts: texts(step.value.pending), rewards: rewards(step.value.rewards) });
    if (step.value.terminated || step.value.truncated) break;
  }
  const end = await ask({ $case: "finalize", value: FinalizeRequest.fromPartial({ episode, lastSeq: String(seen.length - 1) }) });
  if (end.$case !== "finalize") throw new Error(`an answer to finalize is ${end.$case}`);
  return { seen, rewards: rewards(end.value.rewards), endReason: EndReason[end.value.endReason] };
}

async function refusal(call: Promise<unknown>): Promise<unknown> {
  try {
    await call;
  } catch (error) {
    if (error instanceof CallError) return { code: error.code, reason: error.reason, metadata: error.metadata };
    throw error;
  }
  throw new Error("it was not refused");
}

async function main(): Promise<void> {
  const [first, second, third] = await openGroup(values.environment!, 3);
  const stream = new Stream();
  const unaryResult = await play(first!, alone);
  const [driveResult, againResult] = await Promise.all([play(second!, stream.ask), play(third!, stream.ask)]);
  const late = StepRequest.fromPartial({ episode: second!, seq: "99", actions: [{ action: {} }] });
  const errors = {
    unary: await refusal(alone({ $case: "step", value: late })),
    drive: await refusal(stream.ask({ $case: "step", value: late })),
    unknown: await refusal(openGroup("nowhere", 1)),
  };
  stream.end();
  const closing = CloseEpisodesRequest.fromPartial({ episodes: [first!, second!, third!] });
  await unary<CloseEpisodesResponse>((done) => host.closeEpisodes(closing, metadata(nobody), deadline(), done));
  console.log(JSON.stringify({ unary: unaryResult, drive: driveResult, again: againResult, errors }));
}

try {
  await main();
} finally {
  host.close();
}
