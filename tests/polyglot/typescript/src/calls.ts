// One way to make each kind of call: with the key, a deadline, and errors that name their reason.

import { credentials, Metadata, type ClientReadableStream, type ServiceError } from "@grpc/grpc-js";

import { ErrorInfo } from "../gen/google/rpc/error_details.js";
import { Status } from "../gen/google/rpc/status.js";

const DEADLINE_MS = 120_000;

export interface Connection {
  readonly key: string;
  readonly jobToken: string;
}

export const insecure = credentials.createInsecure();

export function metadata(connection: Connection): Metadata {
  const sent = new Metadata();
  if (connection.key) sent.set("authorization", `Bearer ${connection.key}`);
  // Trainer, inference and environment host ask for which job a call is made.
  if (connection.jobToken) sent.set("x-opentinker-job-token", connection.jobToken);
  return sent;
}

export function deadline(): { deadline: Date } {
  return { deadline: new Date(Date.now() + DEADLINE_MS) };
}

// An error with the reason that programs decide by, as in docs: EPISODE_NOT_FOUND, STEP_OUT_OF_ORDER, ...
export class CallError extends Error {
  constructor(
    message: string,
    readonly code: number,
    readonly reason: string,
    readonly metadata: Record<string, string>,
  ) {
    super(`${message} [${reason || code}]`);
  }
}

export function errorOf(status: Status): CallError {
  const any = status.details.find(({ typeUrl }) => typeUrl.endsWith("/google.rpc.ErrorInfo"));
  const info = any && ErrorInfo.decode(any.value);
  return new CallError(status.message, status.code, info?.reason ?? "", info?.metadata ?? {});
}

// The status details hold the reason; without them the code and text of gRPC must do.
export function readable(error: ServiceError): CallError {
  const [details] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (Buffer.isBuffer(details)) return errorOf(Status.decode(details));
  return new CallError(error.message, error.code, "", {});
}

// Turns a call that takes a callback into a promise.
export function unary<Response>(
  call: (done: (error: ServiceError | null, response: Response) => void) => unknown,
): Promise<Response> {
  return new Promise((resolve, reject) => {
    call((error, response) => (error ? reject(readable(error)) : resolve(response)));
  });
}

// Yields what a server streams; leaving the loop cancels the call.
export async function* streamed<Response>(stream: ClientReadableStream<Response>): AsyncGenerator<Response> {
  try {
    for await (const response of stream) {
      yield response as Response;
    }
  } catch (error) {
    throw readable(error as ServiceError);
  } finally {
    stream.cancel();
  }
}
