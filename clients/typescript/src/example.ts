/**
 * Send a message that arrives in two seconds and one that is cancelled before, and receive what comes.
 *
 * `npm run example`, with a broker on 127.0.0.1:7650 or at POSTDATE_ADDRESS.
 */

import { Postdate } from "./client.js";

const postdate = new Postdate(process.env.POSTDATE_ADDRESS);

await postdate.produce(
  "orders",
  { payload: Buffer.from("close order 17 unless it is paid"), deliverAfterMs: 2_000 },
  { payload: Buffer.from("remind customer 4"), deliverAfterMs: 1_000, scheduleKey: "reminder-4" },
);
console.log("Both are on the broker's disk.");

const { result } = await postdate.cancel("orders", "reminder-4");
console.log("The reminder:", result);

const subscription = postdate.subscribe("orders", "billing", { permits: 100 });
for await (const message of subscription) {
  console.log(`"${message.payload}" came ${Date.now() - message.deliverAt.getTime()} ms after its time.`);
  await message.ack();
  break; // a worker would go on
}
await subscription.close();
postdate.close();
