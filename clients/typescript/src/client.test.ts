/** What the client promises, shown on a running broker: POSTDATE_ADDRESS. Each test has a topic of its own. */

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { after, test } from "node:test";

import { status } from "@grpc/grpc-js";

import { Delivered, Postdate, refusal, Subscription } from "./client.js";

const postdate = new Postdate(process.env.POSTDATE_ADDRESS);
after(() => postdate.close());

const OPTIONS = { timeout: 20_000 };
const newTopic = () => `orders-${randomUUID()}`;
const bytes = (text: string) => Buffer.from(text);

async function take(subscription: Subscription, count: number): Promise<Delivered[]> {
  const messages: Delivered[] = [];
  for await (const message of subscription) {
    messages.push(message);
    if (messages.length === count) return messages;
  }
  throw new Error(`the stream ended after ${messages.length} of ${count} messages`);
}

test("a delayed message is not early, and comes whole", OPTIONS, async () => {
  const topic = newTopic();
  await using subscription = postdate.subscribe(topic, "billing");
  await postdate.produce(newTopic(), { payload: bytes("connected") }); // or the time below is past on arrival
  const sent = Date.now();
  const ids = await postdate.produce(
    topic,
    { payload: bytes("second"), deliverAfterMs: 2_000, key: "k", properties: { colour: "grün" } },
    { payload: bytes("first"), deliverAtMs: sent + 1_000 },
  );
  const [first, second] = await take(subscription, 2);

  assert.ok(Date.now() >= second!.deliverAt.getTime());
  assert.ok(second!.deliverAt.getTime() >= sent + 2_000);
  assert.equal(first!.deliverAt.getTime(), sent + 1_000);
  assert.deepEqual([first!.payload, second!.payload], [bytes("first"), bytes("second")]);
  assert.deepEqual([second!.id, first!.id], ids);
  assert.deepEqual([second!.key, { ...second!.properties }, second!.attempt], ["k", { colour: "grün" }, 1]);
  await subscription.ack(first!, second!);
});

test("what was acknowledged does not come back, what was not does", OPTIONS, async () => {
  const topic = newTopic();
  const before = postdate.subscribe(topic, "billing");
  await postdate.produce(topic, { payload: bytes("done") }, { payload: bytes("not done") });
  const messages = await take(before, 2);
  await messages[0]!.ack();
  await before.close();

  await using after = postdate.subscribe(topic, "billing");
  await postdate.produce(topic, { payload: bytes("new") });
  const again = await take(after, 2);
  assert.deepEqual(
    again.map(({ payload, attempt }) => `${payload} ${attempt}`),
    ["not done 1", "new 1"], // a consumer that leaves in good order has not tried
  );
  await after.ack(...again);
});

test("a nack brings a message again, not before it asks for", OPTIONS, async () => {
  const topic = newTopic();
  await using subscription = postdate.subscribe(topic, "billing");
  await postdate.produce(topic, { payload: bytes("retry") });
  const [message] = await take(subscription, 1);
  const given = Date.now();
  await message!.nack(300);
  const [again] = await take(subscription, 1);
  assert.ok(Date.now() >= given + 300);
  assert.deepEqual([again!.id, again!.attempt], [message!.id, 2]);
  await again!.ack();
});

test("a cancelled message is not delivered", OPTIONS, async () => {
  const topic = newTopic();
  await using subscription = postdate.subscribe(topic, "billing");
  await postdate.produce(
    topic,
    { payload: bytes("cancelled"), deliverAfterMs: 2_000, scheduleKey: "order-17" },
    { payload: bytes("kept"), deliverAfterMs: 2_200 },
  );
  assert.equal((await postdate.cancel(topic, "order-17")).result, "CHANGE_RESULT_DONE");
  const [kept] = await take(subscription, 1); // due later: the other one would have come before
  assert.deepEqual(kept!.payload, bytes("kept"));
  await kept!.ack();
  assert.equal((await postdate.cancel(topic, "order-17")).result, "CHANGE_RESULT_ALREADY_CANCELLED");
});

test("a consumer that takes nothing is sent no more than its permits", OPTIONS, async () => {
  const topic = newTopic();
  const idle = postdate.subscribe(topic, "billing", { permits: 10 });
  await postdate.produce(topic, ...Array.from({ length: 100 }, (_, n) => ({ payload: bytes(`${n}`) })));
  const [first] = await take(idle, 1);
  await first!.ack();

  await using busy = postdate.subscribe(topic, "billing", { permits: 10 });
  const messages = await take(busy, 90);
  await busy.ack(...messages);
  await idle.close(); // nine were on their way to it, and come to the other one now
  const rest = await take(busy, 9);
  await busy.ack(...rest);
  const payloads = [first!, ...messages, ...rest].map(({ payload }) => Number(payload));
  assert.deepEqual(payloads.toSorted((a, b) => a - b), Array.from({ length: 100 }, (_, n) => n));
});

test("a refusal is an error that says why", OPTIONS, async () => {
  const tooLate = { payload: bytes("x"), deliverAtMs: Date.now(), deliverAfterMs: 1 };
  await assert.rejects(postdate.produce(newTopic(), tooLate), { code: status.INVALID_ARGUMENT });
  const tooLong = { payload: Buffer.alloc((1 << 20) + 1) };
  await assert.rejects(postdate.produce(newTopic(), tooLong), (error) => {
    const { reason, metadata, retryAfterMs } = refusal(error);
    assert.deepEqual([reason, metadata.limit, retryAfterMs], ["PAYLOAD_TOO_LARGE", `${1 << 20}`, undefined]);
    return true;
  });
  const refused = postdate.subscribe("no/such name", "billing");
  await assert.rejects(take(refused, 1), { code: status.INVALID_ARGUMENT });
  await assert.rejects(refused.ack(), { code: status.INVALID_ARGUMENT });
});

test("a refusal that may pass says when to ask again", OPTIONS, async () => {
  const topic = newTopic();
  await postdate.createTopic(topic, { maxPendingMessages: 1 });
  await using subscription = postdate.subscribe(topic, "billing");
  await postdate.produce(topic, { payload: bytes("one") });
  const [one] = await take(subscription, 1);
  await assert.rejects(postdate.produce(topic, { payload: bytes("two") }), (error) => {
    const { reason, metadata, retryAfterMs } = refusal(error);
    assert.deepEqual([reason, metadata.max_pending_messages], ["PENDING_MESSAGES_EXCEEDED", "1"]);
    assert.ok(retryAfterMs! > 0);
    return true;
  });
  await one!.ack();
  await postdate.produce(topic, { payload: bytes("two") });
  const [two] = await take(subscription, 1);
  await two!.ack();
});

test("an error that is not the broker's has no reason", () => {
  assert.deepEqual(refusal(new Error("the stream ended")), { reason: "", metadata: {} });
});
