// Trains one step and samples the result, with nothing but the generated stubs.
//
//   node build/src/main.js --address HOST:PORT --key-file FILE --model MODEL
//
// Prints one JSON object with what happened.

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import { JobKind, JobState, SlotRole, TuningKind, type Job } from "../gen/opentinkerapi/scheduler/v1/job.js";
import {
  CreateJobRequest,
  FinishJobRequest,
  RenewJobLeaseRequest,
  SchedulerServiceClient,
  WatchJobRequest,
  type CreateJobResponse,
  type FinishJobResponse,
  type RenewJobLeaseResponse,
} from "../gen/opentinkerapi/scheduler/v1/scheduler_service.js";
import { deadline, insecure, metadata, streamed, unary, type Connection } from "./calls.js";
import { Sampler } from "./sampling.js";
import { Policy } from "./training.js";
import { unpackFloats, unpackIds } from "./wire.js";

const TEXT = "to tinker is to learn";

const { values } = parseArgs({
  options: { address: { type: "string" }, "key-file": { type: "string" }, model: { type: "string" } },
});
if (!values.address || !values["key-file"] || !values.model) {
  throw new Error("usage: main.js --address HOST:PORT --key-file FILE --model MODEL");
}
const model = values.model;
const key = readFileSync(values["key-file"], "utf8").trim();
const scheduler = new SchedulerServiceClient(values.address, insecure);
const userOnly: Connection = { key, jobToken: "" };

async function createJob(): Promise<Job> {
  const options = { engine: "", dtype: "float32", servingMode: "", maxLoraRank: 4, contextTokens: 128, exclusive: false };
  const request = CreateJobRequest.fromPartial({
    requestId: randomUUID(),
    job: {
      displayName: "typescript",
      kind: JobKind.JOB_KIND_LORA_RL,
      slots: [
        { role: SlotRole.SLOT_ROLE_TRAINER, baseModel: model, tuning: TuningKind.TUNING_KIND_LORA, options },
        { role: SlotRole.SLOT_ROLE_INFERENCE, baseModel: model, options: { ...options, engine: "transformers" } },
      ],
    },
  });
  const { job } = await unary<CreateJobResponse>((done) =>
    scheduler.createJob(request, metadata(userOnly), deadline(), done),
  );
  if (!job) throw new Error("CreateJob returned no job");
  return job;
}

// The states the job went through, until it is RUNNING.
async function watchUntilRunning(name: string): Promise<string[]> {
  const states: string[] = [];
  const request = WatchJobRequest.fromPartial({ name });
  for await (const { job } of streamed(scheduler.watchJob(request, metadata(userOnly), deadline()))) {
    if (!job) continue;
    const state = JobState[job.state]!;
    if (states.at(-1) !== state) states.push(state);
    if (job.state === JobState.JOB_STATE_RUNNING) return states;
    if (job.error) throw new Error(`the job is ${state}: ${job.error.message}`);
  }
  throw new Error(`the stream ended after ${states.join(", ")}`);
}

async function endpointsOf(name: string): Promise<RenewJobLeaseResponse> {
  const request = RenewJobLeaseRequest.fromPartial({ name });
  return unary<RenewJobLeaseResponse>((done) => scheduler.renewJobLease(request, metadata(userOnly), deadline(), done));
}

async function finish(name: string): Promise<string> {
  const request = FinishJobRequest.fromPartial({
    name,
    requestId: randomUUID(),
    outcome: JobState.JOB_STATE_SUCCEEDED,
    message: "done",
  });
  const { job } = await unary<FinishJobResponse>((done) =>
    scheduler.finishJob(request, metadata(userOnly), deadline(), done),
  );
  return JobState[job?.state ?? JobState.JOB_STATE_UNSPECIFIED]!;
}

async function main(): Promise<void> {
  const job = await createJob();
  const states = await watchUntilRunning(job.name);
  const lease = await endpointsOf(job.name);
  const connection: Connection = { key, jobToken: lease.jobToken };
  const endpoint = (role: SlotRole) => {
    const found = lease.endpoints.find((candidate) => candidate.role === role);
    if (!found) throw new Error(`no endpoint for ${SlotRole[role]}`);
    return found;
  };

  const sampler = new Sampler(endpoint(SlotRole.SLOT_ROLE_INFERENCE), connection);
  const policy = await Policy.create(endpoint(SlotRole.SLOT_ROLE_TRAINER), connection, job.name, model);
  const row = await sampler.tokenize(TEXT);
  const before = await sampler.logprob(policy.name, "0", row);

  // The three are sent one after the other without waiting for a result: they run in the order of their seq.
  const gradient = await policy.crossEntropy([row]);
  const step = await policy.optimStep([gradient], 0.01);
  const publication = await policy.publish();

  const trained = await policy.result(gradient);
  const stepped = await policy.result(step);
  const published = await policy.result(publication);
  if (trained.$case !== "forwardBackward" || stepped.$case !== "optimStep" || published.$case !== "publishWeights") {
    throw new Error(`unexpected results: ${trained.$case}, ${stepped.$case}, ${published.$case}`);
  }
  const version = published.value.version!.version;
  const after = await sampler.logprob(policy.name, version, row);
  const completions = await sampler.sample(policy.name, version, row.slice(0, 3), 6);
  const outcome = await finish(job.name);

  console.log(
    JSON.stringify({
      states,
      policy: policy.name,
      lossSum: trained.value.components[0]?.lossSum,
      lossTokens: trained.value.components[0]?.weight,
      step: stepped.value.step,
      gradNorm: stepped.value.gradNorm,
      version,
      logprobBefore: before,
      logprobAfter: after,
      completions: completions.map((completion) => ({
        tokens: unpackIds(completion.tokenIds),
        logprobs: unpackFloats(completion.logprobs),
        versions: completion.versionSpans.map((span) => span.version),
      })),
      outcome,
    }),
  );
  policy.close();
  sampler.close();
}

try {
  await main();
} finally {
  scheduler.close();
}
