package dev.postdate.example;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Message;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.postdate.v1.Ack;
import dev.postdate.v1.ConsumerServiceGrpc;
import dev.postdate.v1.Delivery;
import dev.postdate.v1.Drain;
import dev.postdate.v1.EntryFailure;
import dev.postdate.v1.EntrySet;
import dev.postdate.v1.Extend;
import dev.postdate.v1.MessageId;
import dev.postdate.v1.Nack;
import dev.postdate.v1.Open;
import dev.postdate.v1.Permits;
import dev.postdate.v1.SubscribeRequest;
import dev.postdate.v1.SubscribeResponse;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;

/** Handles the messages of one subscription, as many at a time as it is told, until it is stopped. */
public final class Worker {
  /**
   * Works on one message. Returning means done; with an exception it comes again after the subscription's back-off.
   * Its thread is interrupted when the message is lost to this worker.
   */
  public interface Handler {
    void handle(Delivery delivery) throws Exception;
  }

  private static final long BACKOFF_FIRST_MS = 50;
  private static final long BACKOFF_MOST_MS = 5_000;
  private static final long GRACE_MS = 30_000; // for handlers that run when the worker is to end
  private static final int REASON_CHARS = 300; // below the 1 KiB that a reason may have, in any script

  private final ManagedChannel channel;
  private final Open open;
  private final int concurrency;
  private final Handler handler;
  private final CountDownLatch stopped = new CountDownLatch(1);
  private Session session;

  public Worker(ManagedChannel channel, String topic, String subscription, int concurrency, Handler handler) {
    this.channel = channel;
    // One permit for each handler, and one more granted with each that ends: the broker sends no more than fits.
    this.open = Open.newBuilder().setTopic(topic).setSubscription(subscription)
        .setPermits(Permits.newBuilder().setMessages(concurrency)).build();
    this.concurrency = concurrency;
    this.handler = handler;
  }

  /** Returns once {@link #stop} was called and what was begun is settled; throws a refusal that no repeat can mend. */
  public void run() throws InterruptedException {
    long pauseMs = BACKOFF_FIRST_MS;
    for (Session now = begin(); now != null; now = begin()) {
      Throwable failure = now.await();
      if (failure != null && !mayTryAgain(failure)) {
        throw Status.fromThrowable(failure).asRuntimeException(Status.trailersFromThrowable(failure));
      }
      if (now.wasOpened) {
        pauseMs = BACKOFF_FIRST_MS;
      }
      long waitMs = Math.max(ThreadLocalRandom.current().nextLong(pauseMs), advisedMs(failure));
      if (stopped.getCount() > 0) {
        System.err.printf("postdate: connecting again in %d ms: %s%n", waitMs, failure);
      }
      stopped.await(waitMs, TimeUnit.MILLISECONDS);
      pauseMs = Math.min(2 * pauseMs, BACKOFF_MOST_MS);
    }
  }

  /** Takes no more; {@link #run} returns when the handlers that run have ended. From any thread, more than once too. */
  public synchronized void stop() {
    stopped.countDown();
    if (session != null) {
      session.drain();
    }
  }

  private synchronized Session begin() {
    if (stopped.getCount() == 0) {
      return null;
    }
    channel.resetConnectBackoff(); // the pauses of run() are enough: gRPC's own grow to two minutes
    session = new Session();
    session.begin();
    return session;
  }

  private static boolean mayTryAgain(Throwable failure) {
    return switch (Status.fromThrowable(failure).getCode()) {
      case UNAVAILABLE, RESOURCE_EXHAUSTED, ABORTED, CANCELLED, UNKNOWN, INTERNAL -> true;
      default -> false;
    };
  }

  /** The broker's word for a refusal, as docs/errors.md lists them; empty if there is none. */
  public static String reason(Throwable failure) {
    return detail(failure, ErrorInfo.class)
        .filter(info -> info.getDomain().equals("postdate.dev")).map(ErrorInfo::getReason).orElse("");
  }

  /** How long the broker asks to wait before the next attempt. */
  private static long advisedMs(Throwable failure) {
    return detail(failure, RetryInfo.class).map(RetryInfo::getRetryDelay)
        .map(delay -> Duration.ofSeconds(delay.getSeconds(), delay.getNanos()).toMillis()).orElse(0L);
  }

  private static <T extends Message> Optional<T> detail(Throwable failure, Class<T> type) {
    com.google.rpc.Status status = failure == null ? null : StatusProto.fromThrowable(failure);
    if (status == null) {
      return Optional.empty();
    }
    for (Any each : status.getDetailsList()) {
      if (each.is(type)) {
        try {
          return Optional.of(each.unpack(type));
        } catch (InvalidProtocolBufferException garbled) {
          return Optional.empty();
        }
      }
    }
    return Optional.empty();
  }

  /** One stream. Handlers, the timer and the thread of {@link #stop} send on it: whoever does holds its lock. */
  private final class Session implements StreamObserver<SubscribeResponse> {
    private final ExecutorService handlers = Executors.newFixedThreadPool(concurrency);
    private final ScheduledExecutorService timer = Executors.newSingleThreadScheduledExecutor();
    private final CountDownLatch ended = new CountDownLatch(1);
    private final AtomicLong requestId = new AtomicLong();
    private ClientCallStreamObserver<SubscribeRequest> stream;
    private final Map<MessageId, Thread> held = new HashMap<>(); // who works on what this consumer holds
    private int running;
    private boolean isDraining;
    private boolean isOver; // nothing may be sent any more
    private volatile long leaseMs = 30_000;
    private volatile Throwable failure;
    volatile boolean wasOpened;

    synchronized void begin() {
      stream = (ClientCallStreamObserver<SubscribeRequest>) ConsumerServiceGrpc.newStub(channel).subscribe(this);
      send(SubscribeRequest.newBuilder().setOpen(open));
    }

    /** Waits for the end of the stream and of its handlers; returns why it ended, null if in good order. */
    Throwable await() throws InterruptedException {
      try {
        ended.await();
      } finally {
        synchronized (this) {
          isOver = true;
          stream.cancel("the worker ends", null); // does nothing if the stream has ended
        }
        handlers.shutdownNow(); // what they still work on comes again
        while (!handlers.awaitTermination(1, TimeUnit.MINUTES)) {
          System.err.println("postdate: a handler goes on although it was interrupted");
        }
        timer.shutdownNow();
      }
      return failure;
    }

    synchronized void drain() {
      if (isOver || isDraining) {
        return;
      }
      isDraining = true;
      send(SubscribeRequest.newBuilder().setDrain(Drain.getDefaultInstance()));
      timer.schedule(() -> stream.cancel("handlers did not end in time", null), GRACE_MS, TimeUnit.MILLISECONDS);
      closeIfIdle();
    }

    private void closeIfIdle() {
      if (isDraining && running == 0 && !isOver) {
        isOver = true;
        stream.onCompleted(); // the broker confirms what it has and ends the stream
      }
    }

    /** What was not acknowledged when a stream ended comes again, so frames that are too late may be dropped. */
    private synchronized void send(SubscribeRequest.Builder frame) {
      if (!isOver) {
        stream.onNext(frame.build());
      }
    }

    private synchronized void take(Delivery delivery) {
      if (isOver || isDraining) {
        return; // it comes back as the stream ends
      }
      running++;
      handlers.execute(() -> work(delivery));
    }

    private void work(Delivery delivery) {
      EntrySet entries = EntrySet.newBuilder().setLedgerId(delivery.getId().getLedgerId())
          .addEntryIds(delivery.getId().getEntryId()).build();
      // The lease is held for as long as the handler takes.
      ScheduledFuture<?> extend = timer.scheduleAtFixedRate(
          () -> send(SubscribeRequest.newBuilder()
              .setExtend(Extend.newBuilder().setRequestId(requestId.incrementAndGet()).addEntries(entries))),
          leaseMs / 3, leaseMs / 3, TimeUnit.MILLISECONDS);
      synchronized (this) {
        held.put(delivery.getId(), Thread.currentThread());
      }
      SubscribeRequest.Builder settled = SubscribeRequest.newBuilder();
      try {
        handler.handle(delivery);
        settled.setAck(Ack.newBuilder().setRequestId(requestId.incrementAndGet()).addEntries(entries));
      } catch (Throwable thrown) {
        String reason = thrown.toString();
        settled.setNack(Nack.newBuilder().setRequestId(requestId.incrementAndGet()).addEntries(entries)
            .setReason(reason.substring(0, Math.min(reason.length(), REASON_CHARS))));
      }
      extend.cancel(false);
      synchronized (this) {
        // What is done is done. A message that was lost is not given back: it may be here again, in another thread.
        if (held.remove(delivery.getId(), Thread.currentThread()) || settled.hasAck()) {
          send(settled);
        }
        running--;
        send(SubscribeRequest.newBuilder().setPermits(Permits.newBuilder().setMessages(1)));
        closeIfIdle();
      }
    }

    private synchronized void lost(EntryFailure entry) {
      System.err.printf("postdate: lost %d:%d: %s%n",
          entry.getId().getLedgerId(), entry.getId().getEntryId(), entry.getError().getMessage());
      Thread worker = held.remove(entry.getId());
      if (worker != null) {
        worker.interrupt();
      }
    }

    @Override
    public void onNext(SubscribeResponse frame) {
      switch (frame.getFrameCase()) {
        case OPENED -> {
          leaseMs = frame.getOpened().getLeaseMs();
          wasOpened = true;
        }
        case BATCH -> frame.getBatch().getDeliveriesList().forEach(this::take);
        case CONFIRMED -> frame.getConfirmed().getFailuresList().forEach(this::lost);
        case DRAINING -> drain(); // the broker stops: what was begun can still be settled
        default -> { } // a heartbeat, or a frame of a later version
      }
    }

    @Override
    public void onError(Throwable thrown) {
      failure = thrown;
      ended.countDown();
    }

    @Override
    public void onCompleted() {
      ended.countDown();
    }
  }
}
