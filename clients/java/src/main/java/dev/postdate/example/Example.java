package dev.postdate.example;

import com.google.protobuf.ByteString;
import dev.postdate.v1.Message;
import dev.postdate.v1.ProduceRequest;
import dev.postdate.v1.ProducerServiceGrpc;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;

/** Sends messages and handles what comes, until SIGTERM or until all came; POSTDATE_ADDRESS names the broker. */
public final class Example {
  private static final int COUNT = 20;

  private final String topic = setting("TOPIC", "orders");
  private final long workMs = Long.parseLong(setting("WORK_MS", "100")); // longer than a lease shows that it is extended
  private final Set<String> handled = ConcurrentHashMap.newKeySet(); // a message may come more than once
  private final ManagedChannel channel;
  private final Worker worker;

  private Example(ManagedChannel channel) {
    this.channel = channel;
    this.worker = new Worker(channel, topic, "billing", 4, delivery -> {
      String order = delivery.getMessage().getPayload().toStringUtf8();
      System.out.printf("handling %s, attempt %d%n", order, delivery.getDeliveryAttempt());
      Thread.sleep(workMs);
      handled.add(order);
      if (handled.size() == COUNT) {
        stop();
      }
    });
  }

  public static void main(String[] arguments) throws InterruptedException {
    ManagedChannel channel = Grpc
        .newChannelBuilder(setting("POSTDATE_ADDRESS", "127.0.0.1:7650"), InsecureChannelCredentials.create())
        .keepAliveTime(20, TimeUnit.SECONDS) // a connection that died is noticed while nothing is due
        .build();
    Example example = new Example(channel);
    Thread main = Thread.currentThread();
    Runtime.getRuntime().addShutdownHook(new Thread(() -> {
      example.stop();
      try {
        main.join(); // the program ends when its hooks have
      } catch (InterruptedException impatient) {
        Thread.currentThread().interrupt();
      }
    }));
    try {
      example.produce(); // the first subscription of a topic gets what waited for it
      example.worker.run();
    } catch (StatusRuntimeException refused) {
      throw new IllegalStateException("refused: " + Worker.reason(refused), refused);
    } finally {
      channel.shutdown().awaitTermination(5, TimeUnit.SECONDS);
    }
    System.out.println(example.handled.size() + " handled");
  }

  private void stop() {
    worker.stop();
  }

  private void produce() {
    ProduceRequest.Builder request = ProduceRequest.newBuilder().setTopic(topic);
    for (int number = 0; number < COUNT; number++) {
      request.addMessages(Message.newBuilder()
          .setPayload(ByteString.copyFromUtf8("order " + number)).setDeliverAfterMs(20L * number));
    }
    ProducerServiceGrpc.newBlockingStub(channel).withWaitForReady().withDeadlineAfter(30, TimeUnit.SECONDS)
        .produce(request.build());
  }

  private static String setting(String name, String otherwise) {
    return Optional.ofNullable(System.getenv(name)).orElse(otherwise);
  }
}
