// Sends COUNT messages and handles what comes, until SIGTERM or until all came; POSTDATE_ADDRESS names the broker.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	postdate "postdate.dev/go"
	pb "postdate.dev/go/v1"
)

const (
	topic = "orders"
	count = 20
)

func main() {
	address := os.Getenv("POSTDATE_ADDRESS")
	if address == "" {
		address = "127.0.0.1:7650"
	}
	connection, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		// A connection that died is noticed while nothing is due.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()

	var handled sync.Map // by payload: a message may come more than once
	var done atomic.Int32
	worker := &postdate.Worker{
		Client: pb.NewConsumerServiceClient(connection), Topic: topic, Subscription: "billing", Concurrency: 4,
		Handle: func(ctx context.Context, delivery *pb.Delivery) error {
			fmt.Printf("handling %s, attempt %d\n", delivery.Message.Payload, delivery.DeliveryAttempt)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(worktime()):
			}
			if _, before := handled.LoadOrStore(string(delivery.Message.Payload), true); !before && done.Add(1) == count {
				stop()
			}
			return nil
		},
	}
	// The first subscription of a topic gets what waited for it.
	if err := produce(ctx, pb.NewProducerServiceClient(connection)); err != nil {
		log.Fatalf("%v (%s)", err, postdate.Reason(err))
	}
	if err := worker.Run(ctx); err != nil {
		log.Fatalf("%v (%s)", err, postdate.Reason(err))
	}
	fmt.Printf("%d handled\n", done.Load())
}

func produce(ctx context.Context, client pb.ProducerServiceClient) error {
	request := &pb.ProduceRequest{Topic: topic}
	for number := range count {
		request.Messages = append(request.Messages, &pb.Message{
			Payload: []byte(fmt.Sprintf("order %d", number)), DeliverAfterMs: int64(20 * number),
		})
	}
	_, err := client.Produce(ctx, request, grpc.WaitForReady(true))
	return err
}

// worktime is how long a message takes; longer than a lease shows that it is extended.
func worktime() time.Duration {
	given, err := time.ParseDuration(os.Getenv("WORK"))
	if err != nil {
		return 100 * time.Millisecond
	}
	return given
}
