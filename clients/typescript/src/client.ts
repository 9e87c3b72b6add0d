/**
 * A small client of Postdate: produce with a delivery time, consume from a stream, cancel what is pending.
 *
 * Everything on the wire has its type from `src/generated`, which `npm run generate` writes from the protos.
 */

import { fileURLToPath } from "node:url";

import * as grpc from "@grpc/grpc-js";
import { loadSync, type MessageTypeDefinition } from "@grpc/proto-loader";

import type { ProtoGrpcType as AdminProto } from "./generated/admin.js";
import type { ProtoGrpcType as ConsumerProto } from "./generated/consumer.js";
import type { ErrorInfo, ErrorInfo__Output } from "./generated/google/rpc/ErrorInfo.js";
import type { RetryInfo, RetryInfo__Output } from "./generated/google/rpc/RetryInfo.js";
import type { CancelScheduledResponse__Output } from "./generated/postdate/v1/CancelScheduledResponse.js";
import type { ChangeOutcome__Output } from "./generated/postdate/v1/ChangeOutcome.js";
import type { Confirmed__Output } from "./generated/postdate/v1/Confirmed.js";
import type { CreateTopicResponse__Output } from "./generated/postdate/v1/CreateTopicResponse.js";
import type { Delivery__Output } from "./generated/postdate/v1/Delivery.js";
import type { EntrySet } from "./generated/postdate/v1/EntrySet.js";
import type { Message } from "./generated/postdate/v1/Message.js";
import type { MessageId__Output } from "./generated/postdate/v1/MessageId.js";
import type { ProduceResponse__Output } from "./generated/postdate/v1/ProduceResponse.js";
import type { SubscribeRequest } from "./generated/postdate/v1/SubscribeRequest.js";
import type { SubscribeResponse__Output } from "./generated/postdate/v1/SubscribeResponse.js";
import type { TopicPolicy } from "./generated/postdate/v1/TopicPolicy.js";
import type { ProtoGrpcType as ProducerProto } from "./generated/producer.js";
import type { ProtoGrpcType as ScheduleProto } from "./generated/schedule.js";

const PROTOS = ["protos", "third_party"].map((name) => fileURLToPath(new URL(`../../../${name}`, import.meta.url)));

// These say the same as the flags of `npm run generate`, or the types would lie. Times and ids stay below 2 ** 53.
const files = ["producer", "consumer", "schedule", "admin"].map((name) => `postdate/v1/${name}.proto`);
const definitions = loadSync([...files, "google/rpc/error_details.proto"], {
  includeDirs: PROTOS,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
interface Details {
  ErrorInfo: MessageTypeDefinition<ErrorInfo, ErrorInfo__Output>;
  RetryInfo: MessageTypeDefinition<RetryInfo, RetryInfo__Output>;
}
type Protos = ProducerProto & ConsumerProto & ScheduleProto & AdminProto & { google: { rpc: Details } };
const {
  postdate: { v1 },
  google: { rpc },
} = grpc.loadPackageDefinition(definitions) as unknown as Protos;

const CHANNEL = { "grpc.keepalive_time_ms": 30_000, "grpc.keepalive_timeout_ms": 10_000 };

/** A message to be sent. (protobufjs would take a payload that is a string for base64, so it is bytes here.) */
export type Outgoing = Omit<Message, "payload"> & { payload: Uint8Array };

/** One broker. Calls wait up to `timeoutMs` for it to be there; what it refuses is thrown as a `grpc.ServiceError`. */
export class Postdate {
  readonly #producers: InstanceType<typeof v1.ProducerService>;
  readonly #consumers: InstanceType<typeof v1.ConsumerService>;
  readonly #schedule: InstanceType<typeof v1.ScheduleService>;
  readonly #admin: InstanceType<typeof v1.AdminService>;
  readonly #timeoutMs: number;

  constructor(
    address = "127.0.0.1:7650",
    { timeoutMs = 10_000, credentials = grpc.credentials.createInsecure() } = {},
  ) {
    this.#producers = new v1.ProducerService(address, credentials, CHANNEL);
    this.#consumers = new v1.ConsumerService(address, credentials, CHANNEL);
    this.#schedule = new v1.ScheduleService(address, credentials, CHANNEL);
    this.#admin = new v1.AdminService(address, credentials, CHANNEL);
    this.#timeoutMs = timeoutMs;
  }

  /** Store a batch, all or none; the ids, in its order, once they are on the broker's disk. */
  async produce(topic: string, ...messages: Outgoing[]): Promise<MessageId__Output[]> {
    const response = await answer<ProduceResponse__Output>((done) =>
      this.#producers.produce({ topic, messages }, waiting(), this.#deadline(), done),
    );
    return response.ids.flatMap(({ ledgerId, firstEntryId, count }) =>
      Array.from({ length: count }, (_, index) => ({ ledgerId, entryId: firstEntryId + index })),
    );
  }

  /** Cancel the message that waits under this key. The result says whether it was in time. */
  async cancel(topic: string, scheduleKey: string): Promise<ChangeOutcome__Output> {
    const response = await answer<CancelScheduledResponse__Output>((done) =>
      this.#schedule.cancelScheduled(
        { topic, selector: { scheduleKeys: [scheduleKey] } },
        waiting(),
        this.#deadline(),
        done,
      ),
    );
    return response.outcomes[0]!; // one for each key that was named
  }

  /** Attach a consumer. The broker sends at most `permits` messages that were not taken yet. */
  subscribe(topic: string, subscription: string, { permits = 100 } = {}): Subscription {
    return new Subscription(this.#consumers.subscribe(waiting()), topic, subscription, permits);
  }

  /** Make a topic with settings of its own. Without this the first message makes it, with the broker's. */
  async createTopic(name: string, policy: TopicPolicy): Promise<void> {
    await answer<CreateTopicResponse__Output>((done) =>
      this.#admin.createTopic({ name, policy }, waiting(), this.#deadline(), done),
    );
  }

  close(): void {
    for (const client of [this.#producers, this.#consumers, this.#schedule, this.#admin]) client.close();
  }

  #deadline(): grpc.CallOptions {
    return { deadline: Date.now() + this.#timeoutMs };
  }
}

/** Why the broker refused: a reason of docs/errors.md, the limits and the like that go with it, and when to ask again. */
export interface Refusal {
  /** Empty if the broker gave none: the connection was lost, or gRPC itself refused. */
  reason: string;
  metadata: Record<string, string>;
  /** At least this long, for what may be asked again; else undefined. */
  retryAfterMs?: number;
}

/** What an error says beside its code: google.rpc.ErrorInfo and RetryInfo of the trailer `grpc-status-details-bin`. */
export function refusal(error: unknown): Refusal {
  const found: Refusal = { reason: "", metadata: {} };
  const [trailer] = (error as Partial<grpc.ServiceError>).metadata?.get("grpc-status-details-bin") ?? [];
  if (!Buffer.isBuffer(trailer)) return found;
  for (const { type_url, value } of rpc.Status.deserialize(trailer).details) {
    if (type_url.endsWith("/google.rpc.ErrorInfo")) {
      const { domain, reason, metadata } = rpc.ErrorInfo.deserialize(value);
      if (domain === "postdate.dev") Object.assign(found, { reason, metadata });
    } else if (type_url.endsWith("/google.rpc.RetryInfo")) {
      const { retryDelay } = rpc.RetryInfo.deserialize(value);
      found.retryAfterMs = retryDelay!.seconds * 1_000 + retryDelay!.nanos / 1e6;
    }
  }
  return found;
}

/** For a broker with TLS: the certificate of its authority, and a token if it asks for one. */
export function secured(ca: Buffer, token?: string): grpc.ChannelCredentials {
  const channel = grpc.credentials.createSsl(ca);
  if (token === undefined) return channel;
  const bearer = grpc.credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new grpc.Metadata();
    metadata.set("authorization", `Bearer ${token}`);
    done(null, metadata);
  });
  return grpc.credentials.combineChannelCredentials(channel, bearer);
}

/** A message, delivered; to be settled with `ack` or `nack` before its lease ends. */
export class Delivered {
  readonly id: MessageId__Output;
  readonly payload: Buffer;
  readonly key: string;
  readonly properties: Record<string, string>;
  readonly scheduleKey: string;
  readonly deliverAt: Date;
  /** 1 for the first delivery. */
  readonly attempt: number;
  readonly #subscription: Subscription;

  constructor(delivery: Delivery__Output, subscription: Subscription) {
    const message = delivery.message!;
    this.id = delivery.id!;
    this.payload = message.payload;
    this.key = message.key;
    this.properties = message.properties;
    this.scheduleKey = message.scheduleKey;
    this.deliverAt = new Date(delivery.deliverAtMs);
    this.attempt = delivery.deliveryAttempt;
    this.#subscription = subscription;
  }

  /** Done: once this returns, the message never comes back on this subscription. */
  ack(): Promise<void> {
    return this.#subscription.ack(this);
  }

  /** Give it back. Without a delay it comes again after the subscription's back-off. */
  nack(redeliverAfterMs = 0): Promise<void> {
    return this.#subscription.nack(redeliverAfterMs, this);
  }
}

type Stream = grpc.ClientDuplexStream<SubscribeRequest, SubscribeResponse__Output>;

/**
 * What one consumer is sent. Iterating ends when the broker closes the stream in good order (it stops, or the
 * subscription is sought elsewhere) and throws when it is refused or lost: subscribe again then. Messages that were
 * not acknowledged come back.
 */
export class Subscription implements AsyncIterable<Delivered>, AsyncDisposable {
  readonly #stream: Stream;
  readonly #permits: number;
  readonly #arrived: Delivered[] = []; // at most `permits`: the broker sends no more before it is told to
  readonly #unconfirmed = new Map<number, { resolve: () => void; reject: (reason: Error) => void }>(); // by request id
  readonly #ended: Promise<void>;
  #state: "open" | "closing" | "ended" = "open";
  #failure: Error | undefined;
  #wake = () => {}; // whoever waits for `#arrived` or the end
  #takenCount = 0; // since permits were granted last
  #requestId = 0;

  constructor(stream: Stream, topic: string, subscription: string, permits: number) {
    this.#stream = stream;
    this.#permits = permits;
    this.#ended = new Promise((resolve) => {
      stream.on("error", (error) => resolve(this.#end(error)));
      stream.on("end", () => resolve(this.#end()));
    });
    stream.on("data", (frame) => this.#read(frame));
    stream.write({ open: { topic, subscription, permits: { messages: permits } } });
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Delivered, void> {
    for (;;) {
      const message = this.#arrived.shift();
      if (message !== undefined) {
        this.#grant();
        yield message;
      } else if (this.#state !== "ended") {
        await new Promise<void>((resolve) => (this.#wake = resolve));
      } else if (this.#failure !== undefined) {
        throw this.#failure;
      } else {
        return;
      }
    }
  }

  /** Acknowledge; returns when no crash of the broker can undo it. Many in one call cost one frame. */
  ack(...messages: Delivered[]): Promise<void> {
    return this.#settle((requestId) => ({ ack: { requestId, entries: entriesOf(messages) } }));
  }

  /** Give back; returns when it is durable. */
  nack(redeliverAfterMs: number, ...messages: Delivered[]): Promise<void> {
    return this.#settle((requestId) => ({ nack: { requestId, redeliverAfterMs, entries: entriesOf(messages) } }));
  }

  /** Take no more, wait until what was acknowledged is confirmed, and leave. What was not comes back at once. */
  async close(): Promise<void> {
    if (this.#state === "open") {
      this.#state = "closing";
      this.#stream.write({ drain: {} });
      this.#stream.end();
    }
    await this.#ended;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #read(frame: SubscribeResponse__Output): void {
    if (frame.frame === "batch" && this.#state === "open") {
      this.#arrived.push(...frame.batch!.deliveries.map((delivery) => new Delivered(delivery, this)));
      this.#wake();
    } else if (frame.frame === "confirmed") {
      this.#confirm(frame.confirmed!);
    }
  }

  #grant(): void {
    this.#takenCount += 1;
    // Half of them at a time: the broker need not wait for permits, and a frame is not spent on each message.
    if (this.#state === "open" && this.#takenCount * 2 >= this.#permits) {
      this.#stream.write({ permits: { messages: this.#takenCount } });
      this.#takenCount = 0;
    }
  }

  #settle(frameOf: (requestId: number) => SubscribeRequest): Promise<void> {
    if (this.#state !== "open") return Promise.reject(this.#failure ?? new Error("the subscription is closed"));
    const requestId = ++this.#requestId;
    this.#stream.write(frameOf(requestId));
    return new Promise((resolve, reject) => this.#unconfirmed.set(requestId, { resolve, reject }));
  }

  #confirm({ requestId, failures }: Confirmed__Output): void {
    const waiter = this.#unconfirmed.get(requestId);
    this.#unconfirmed.delete(requestId);
    if (failures.length === 0) waiter?.resolve();
    else waiter?.reject(new Error(failures.map(({ error }) => error?.message).join("; ")));
  }

  #end(failure?: Error): void {
    this.#state = "ended";
    this.#failure ??= failure;
    this.#arrived.length = 0; // they come back: a settlement of one could not be sent any more
    for (const { reject } of this.#unconfirmed.values()) {
      reject(failure ?? new Error("the stream ended before this was confirmed"));
    }
    this.#unconfirmed.clear();
    this.#wake();
  }
}

function entriesOf(messages: Delivered[]): EntrySet[] {
  const byLedger = new Map<number, number[]>();
  for (const { id } of messages) {
    byLedger.set(id.ledgerId, [...(byLedger.get(id.ledgerId) ?? []), id.entryId]);
  }
  return [...byLedger].map(([ledgerId, entryIds]) => ({ ledgerId, entryIds }));
}

/** A call that waits for a broker that is starting, instead of failing at once. */
function waiting(): grpc.Metadata {
  return new grpc.Metadata({ waitForReady: true });
}

/** A call with a callback as a promise. */
function answer<T>(call: (done: grpc.requestCallback<T>) => unknown): Promise<T> {
  return new Promise((resolve, reject) => call((error, value) => (error ? reject(error) : resolve(value!))));
}
