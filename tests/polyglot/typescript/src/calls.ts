// One way to make each kind of call: with the key, a deadline, and errors that name their reason.

import { credentials, Metadata, type ClientReadableStream, type ServiceError } from "@grpc/grpc-js";

import { Status } from "../gen/google/rpc/status.js";

const DEADLINE_MS = 120_000;

export interface Connection {
  readonly key: string;
  readonly jobToken: string;
}

export const insecure = credentials.createInsecure();

export function metadata(connection: Connection): Metadata {
  const sent = new Metadata();
  sent.set("authorization", `Bearer ${connection.key}`);
  // Trainer, inference and environment host ask for which job a call is made.
  if (connection.jobToken) sent.set("x-opentinker-job-token", connection.jobToken);
  return sent;
}

export function deadline(): { deadline: Date } {
  return { deadline: new Date(Date.now() + DEADLINE_MS) };
}

// The status details hold the reason; without them the code and text of gRPC must do.
export function readable(error: ServiceError): Error {
  const [details] = error.metadata?.get("grpc-status-details-bin") ?? [];
  const kinds = Buffer.isBuffer(details) ? Status.decode(details).details.map((any) => any.typeUrl) : [];
  return new Error(`${error.message} [${kinds.join(", ")}]`);
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
