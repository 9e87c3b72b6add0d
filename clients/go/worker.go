package postdate

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "postdate.dev/go/v1"
)

// Handler works on one message. Nil means done; with an error the message comes again after the subscription's
// back-off. Its context ends when the message is lost to this worker.
type Handler func(ctx context.Context, delivery *pb.Delivery) error

// Worker handles the messages of one subscription, Concurrency at a time, until its context ends.
type Worker struct {
	Client              pb.ConsumerServiceClient
	Topic, Subscription string
	Concurrency         int
	Handle              Handler
}

const (
	backoffFirst = 50 * time.Millisecond
	backoffMost  = 5 * time.Second
	grace        = 30 * time.Second // for handlers that run when the worker is to end
)

// Run returns nil once ctx has ended and what was begun is settled, or the refusal that no repeat can mend.
func (w *Worker) Run(ctx context.Context) error {
	pause := backoffFirst
	for {
		opened, err := w.consume(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil && !again(err) {
			return err
		}
		if opened {
			pause = backoffFirst
		}
		wait := max(time.Duration(rand.Int64N(int64(pause))), advised(err))
		slog.Warn("postdate: connecting again", "in", wait, "cause", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		pause = min(2*pause, backoffMost)
	}
}

// session is one stream. Its sender is shared by handlers, so it has a lock.
type session struct {
	stream   pb.ConsumerService_SubscribeClient
	sending  sync.Mutex
	handlers sync.WaitGroup
	held     sync.Map // messageID to *work
	lease    time.Duration
	request  uint64
}

type messageID struct{ ledger, entry uint64 }

// work is a handler at work on a message that this consumer holds.
type work struct{ cancel context.CancelFunc }

// consume holds one stream until it ends; opened tells whether the broker has accepted it.
func (w *Worker) consume(ctx context.Context) (opened bool, err error) {
	// The stream outlives ctx, so that what was begun can still be acknowledged.
	lifetime, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stream, err := w.Client.Subscribe(lifetime)
	if err != nil {
		return false, err
	}
	s := &session{stream: stream, lease: 30 * time.Second}
	defer s.handlers.Wait()
	defer cancel() // before Wait: a handler learns by its context that its message is lost
	// One permit for each handler, and one more granted with each that ends: the broker sends no more than fits.
	s.send(&pb.SubscribeRequest{Frame: &pb.SubscribeRequest_Open{Open: &pb.Open{
		Topic: w.Topic, Subscription: w.Subscription, Permits: &pb.Permits{Messages: uint32(w.Concurrency)},
	}}})
	stop := context.AfterFunc(ctx, func() {
		s.send(&pb.SubscribeRequest{Frame: &pb.SubscribeRequest_Drain{Drain: &pb.Drain{}}})
		time.AfterFunc(grace, cancel)
		s.handlers.Wait()
		s.sending.Lock()
		defer s.sending.Unlock()
		_ = stream.CloseSend() // the broker confirms what it has and ends the stream
	})
	defer stop()
	for {
		frame, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return opened, nil
		}
		if err != nil {
			return opened, err
		}
		switch frame := frame.Frame.(type) {
		case *pb.SubscribeResponse_Opened:
			opened = true
			s.lease = time.Duration(frame.Opened.LeaseMs) * time.Millisecond
		case *pb.SubscribeResponse_Batch:
			for _, delivery := range frame.Batch.Deliveries {
				if ctx.Err() != nil {
					break // it comes back as the stream ends
				}
				s.handlers.Add(1)
				go s.handle(lifetime, w.Handle, delivery)
			}
		case *pb.SubscribeResponse_Confirmed:
			for _, failure := range frame.Confirmed.Failures {
				slog.Warn("postdate: lost", "id", failure.Id, "error", failure.Error)
				if lost, held := s.held.LoadAndDelete(messageID{failure.Id.LedgerId, failure.Id.EntryId}); held {
					lost.(*work).cancel()
				}
			}
		case *pb.SubscribeResponse_Draining:
			return opened, status.Error(codes.Unavailable, "the broker is stopping")
		}
	}
}

// handle works on one message, and holds its lease for as long as that takes.
func (s *session) handle(ctx context.Context, handle Handler, delivery *pb.Delivery) {
	defer s.handlers.Done()
	entries := []*pb.EntrySet{{LedgerId: delivery.Id.LedgerId, EntryIds: []uint64{delivery.Id.EntryId}}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	id, mine := messageID{delivery.Id.LedgerId, delivery.Id.EntryId}, &work{cancel}
	s.held.Store(id, mine)
	done := make(chan error, 1)
	go func() { done <- handle(ctx, delivery) }()
	extend := time.NewTicker(s.lease / 3)
	defer extend.Stop()
	for {
		select {
		case <-extend.C:
			s.send(&pb.SubscribeRequest{Frame: &pb.SubscribeRequest_Extend{Extend: &pb.Extend{RequestId: s.next(), Entries: entries}}})
		case err := <-done:
			isHeld := s.held.CompareAndDelete(id, mine)
			if err == nil {
				s.send(&pb.SubscribeRequest{Frame: &pb.SubscribeRequest_Ack{Ack: &pb.Ack{RequestId: s.next(), Entries: entries}}})
			} else if isHeld { // what was lost may be here again, with another handler
				reason := err.Error()
				reason = strings.ToValidUTF8(reason[:min(len(reason), 1024)], "") // what is no UTF-8 cannot be sent
				s.send(&pb.SubscribeRequest{Frame: &pb.SubscribeRequest_Nack{Nack: &pb.Nack{RequestId: s.next(), Entries: entries, Reason: reason}}})
			}
			s.send(&pb.SubscribeRequest{Frame: &pb.SubscribeRequest_Permits{Permits: &pb.Permits{Messages: 1}}})
			return
		}
	}
}

// send ignores failures: Recv tells why a stream has ended, and what was not acknowledged comes back.
func (s *session) send(frame *pb.SubscribeRequest) {
	s.sending.Lock()
	defer s.sending.Unlock()
	_ = s.stream.Send(frame)
}

func (s *session) next() uint64 {
	s.sending.Lock()
	defer s.sending.Unlock()
	s.request++
	return s.request
}

// again tells whether another attempt may do better.
func again(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.ResourceExhausted, codes.Aborted, codes.Canceled, codes.Unknown, codes.Internal:
		return true
	}
	return false
}

// advised is how long the broker asks to wait: google.rpc.RetryInfo.
func advised(err error) time.Duration {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.RetryDelay.AsDuration()
		}
	}
	return 0
}

// Reason is the broker's word for a refusal, as docs/errors.md lists them: google.rpc.ErrorInfo.
func Reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.Domain == "postdate.dev" {
			return info.Reason
		}
	}
	return ""
}
