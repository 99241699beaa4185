//! The rules, without a clock; then the waiting, with tasks that are cancelled.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::{state::State, *};

const GIB: u64 = 1 << 30;

fn host(transactions_max: usize) -> HostBounds {
    HostBounds::new(transactions_max, 4 * GIB)
}

fn ask(tenant_id: i32, consumer_id: i32) -> AdmissionRequest {
    AdmissionRequest { tenant_id, consumer_id, class: Class::Fair, memory: 64 << 20, messages: 1 }
}

fn weighing(weight: u32) -> TenantLimits {
    TenantLimits { weight, ..TenantLimits::default() }
}

fn took(ms: f64) -> Usage {
    Usage {
        cpu: Duration::from_secs_f64(ms / 4e3),
        database: Duration::from_secs_f64(ms * 3.0 / 4e3),
    }
}

/// A host whose tenants always have something to do: each asks again for what it was granted.
struct Busy {
    state: State,
    running: Vec<(f64, Grant)>,
    now: f64,
    /// Cost of each tenant's transactions.
    had: BTreeMap<i32, f64>,
    /// Most grants of other tenants while one of a tenant waited.
    overtaken: BTreeMap<i32, u64>,
}

impl Busy {
    fn new(transactions_max: usize, weights: &[u32]) -> Self {
        let mut state = State::new(host(transactions_max));
        for (tenant_id, weight) in (0..).zip(weights) {
            state.set_limits(tenant_id, 1, "", &weighing(*weight), Duration::ZERO);
        }
        Self {
            state,
            running: Vec::new(),
            now: 0.0,
            had: BTreeMap::new(),
            overtaken: BTreeMap::new(),
        }
    }

    fn dispatch(&mut self, mut cost: impl FnMut(i32) -> f64) {
        for grant in self.state.dispatch(Duration::from_secs_f64(self.now / 1e3)).grants {
            let overtaken = self.overtaken.entry(grant.tenant_id).or_default();
            *overtaken = grant.overtaken.max(*overtaken);
            self.running.push((self.now + cost(grant.tenant_id), grant));
        }
    }

    /// Ends the transaction that ends first, and returns its tenant.
    fn step(&mut self, took_ms: impl Fn(&Grant) -> f64) -> i32 {
        self.running.sort_by(|(one, _), (other, _)| other.partial_cmp(one).unwrap());
        let (ends, grant) = self.running.pop().expect("something runs");
        self.now = ends;
        let cost = took_ms(&grant);
        *self.had.entry(grant.tenant_id).or_default() += cost;
        self.state.end(&grant, took(cost), 1, Duration::from_secs_f64(ends / 1e3));
        grant.tenant_id
    }
}

// What could go wrong: a tenant gets more than its weight by having dear transactions, or many at a
// time. Or a tenant waits for ever. Weights, costs and widths are drawn; each tenant's cost may be
// a hundred times another's.
#[test]
fn shares_follow_the_weights_and_everybody_gets_on() {
    for seed in 0..12 {
        let mut rng = StdRng::seed_from_u64(seed);
        let tenants = rng.random_range(2..=6);
        let weights: Vec<u32> =
            (0..tenants).map(|_| *[25, 50, 100, 100, 200, 400].choose(&mut rng).unwrap()).collect();
        let means: Vec<f64> =
            (0..tenants).map(|_| 10_f64.powf(rng.random_range(-1.0..1.0))).collect();
        // As many run at once as there are places, so that it is the scheduler alone that shares
        // them out.
        let slots = rng.random_range(1..=12);
        let mut busy = Busy::new(slots, &weights);
        for tenant_id in 0..tenants {
            (0..2 * slots as i32).for_each(|n| {
                busy.state.ask(ask(tenant_id, n % 3), Duration::ZERO);
            });
        }
        // The scheduler knows the cost of a transaction only when it has ended; the test's clock
        // knows it from the beginning.
        let draw = |rng: &mut StdRng, tenant_id: i32| {
            means[tenant_id as usize] * rng.random_range(0.2..1.8)
        };
        let mut costs: BTreeMap<u64, f64> = BTreeMap::new();
        for step in 0..20_000 {
            if step == 3_000 {
                busy.had.clear(); // all began together, without a history
            }
            let began = busy.running.len();
            busy.dispatch(|tenant_id| draw(&mut rng, tenant_id));
            for (ends, grant) in &busy.running[began..] {
                costs.insert(grant.id, ends - busy.now);
            }
            let whose = busy.step(|grant| costs[&grant.id]);
            busy.state
                .ask(ask(whose, rng.random_range(0..3)), Duration::from_secs_f64(busy.now / 1e3));
        }
        let (all, weight) = (busy.had.values().sum::<f64>(), weights.iter().sum::<u32>());
        for (tenant_id, weight_of) in (0..).zip(&weights) {
            let (share, fair) =
                (busy.had[&tenant_id] / all, f64::from(*weight_of) / f64::from(weight));
            // A tenant that runs nothing may have one of the places that are kept, even where its
            // share is less than a place.
            let kept = (slots / 8) as f64 / slots as f64;
            let (least, most) = (fair * (1.0 - kept) * 0.95, fair.max(kept) * 1.05);
            assert!(
                (least..=most).contains(&share),
                "seed {seed}: tenant {tenant_id} had {share:.3} for {fair:.3} of {weights:?}, \
                    {means:?}, {slots} places"
            );
            // Bound: transactions that others may begin while the dearest of its transactions, all
            // running at once, are paid off.
            let dearest =
                means[tenant_id as usize] * 1.8 * (slots + 2) as f64 / f64::from(*weight_of);
            let bound: f64 = (0..)
                .zip(&weights)
                .filter(|(other, _)| *other != tenant_id)
                .map(|(other, weight)| {
                    dearest * f64::from(*weight) / (means[other as usize] * 0.2)
                        + 4.0 * slots as f64
                })
                .sum();
            assert!(
                (busy.overtaken[&tenant_id] as f64) < bound * (2 * slots) as f64,
                "seed {seed}: tenant {tenant_id} was overtaken {} times",
                busy.overtaken[&tenant_id]
            );
        }
    }
}

// What could go wrong: a backlog delays tenants that send little.
#[test]
fn who_sends_little_goes_before_a_backlog() {
    for slots in [1, 2, 4, 8, 32] {
        let mut busy = Busy::new(slots, &[100, 100]);
        (0..64).for_each(|n| {
            busy.state.ask(ask(0, n % 8), Duration::ZERO);
        });
        for step in 0..5_000 {
            busy.dispatch(|tenant_id| if tenant_id == 0 { 20.0 } else { 5.0 });
            if busy.step(|grant| if grant.tenant_id == 0 { 20.0 } else { 5.0 }) == 0 {
                busy.state.ask(ask(0, step % 8), Duration::from_secs_f64(busy.now / 1e3));
            }
            if step % 50 == 25 {
                busy.state.ask(ask(1, 0), Duration::from_secs_f64(busy.now / 1e3));
            }
        }
        let counts = busy.state.snapshot().tenants;
        assert_eq!(counts[&1].granted, 100, "{slots}");
        assert_eq!(counts[&1].overtaken_max, 0, "with {slots} places");
    }
}

// What could go wrong: one tenant that its own rate holds back keeps the clocks of all behind. A
// tenant that comes later then has the host to itself for as long as the others were busy before.
#[test]
fn who_is_held_back_holds_nobody_elses_clock() {
    let mut busy = Busy::new(4, &[100, 100, 100]);
    busy.state.set_caps(0, 0, None, Some(1), Duration::ZERO);
    let again = |busy: &mut Busy, whose: i32| {
        busy.state.ask(ask(whose, 0), Duration::from_secs_f64(busy.now / 1e3));
    };
    (0..8).for_each(|_| (0..2).for_each(|tenant_id| again(&mut busy, tenant_id)));
    for _ in 0..4_000 {
        busy.dispatch(|_| 10.0);
        let whose = busy.step(|_| 10.0);
        again(&mut busy, whose);
    }
    assert!(busy.had[&1] > 20.0 * busy.had[&0], "{:?}", busy.had);
    busy.had.clear();
    (0..8).for_each(|_| again(&mut busy, 2));
    for _ in 0..400 {
        busy.dispatch(|_| 10.0);
        let whose = busy.step(|_| 10.0);
        again(&mut busy, whose);
    }
    let share = busy.had[&1] / (busy.had[&1] + busy.had[&2]);
    assert!(
        (share - 0.5).abs() < 0.05,
        "the one that was busy before had {share:.2} beside a new one"
    );
}

#[test]
fn an_idle_tenant_saves_nothing_up() {
    let mut busy = Busy::new(1, &[100, 100]);
    busy.state.ask(ask(0, 0), Duration::ZERO);
    for _ in 0..1_000 {
        busy.dispatch(|_| 10.0);
        busy.step(|_| 10.0);
        busy.state.ask(ask(0, 0), Duration::from_secs_f64(busy.now / 1e3));
    }
    busy.had.clear();
    (0..4).for_each(|_| {
        busy.state.ask(ask(1, 0), Duration::from_secs_f64(busy.now / 1e3));
    });
    for _ in 0..100 {
        busy.dispatch(|_| 10.0);
        let whose = busy.step(|_| 10.0);
        busy.state.ask(ask(whose, 0), Duration::from_secs_f64(busy.now / 1e3));
    }
    assert!((busy.had[&0] - busy.had[&1]).abs() <= 20.0, "{:?}", busy.had);
}

// What could go wrong: transactions that are assumed to be dear, and are cheap, leave their tenant
// far behind the newcomers, or those far behind it.
#[test]
fn a_wrong_guess_of_the_cost_is_put_right() {
    let mut busy = Busy::new(8, &[100, 100]);
    let now = |busy: &Busy| Duration::from_secs_f64(busy.now / 1e3);
    (0..32).for_each(|_| {
        busy.state.ask(ask(0, 0), Duration::ZERO);
    });
    for _ in 0..200 {
        busy.dispatch(|_| 5_000.0);
        busy.step(|_| 5_000.0);
        busy.state.ask(ask(0, 0), now(&busy));
    }
    // From here on they are cheap, those that run as well, and another tenant comes.
    let soon = busy.now + 1.0;
    busy.running.iter_mut().for_each(|(ends, _)| *ends = soon);
    (0..16).for_each(|_| {
        busy.state.ask(ask(1, 0), now(&busy));
    });
    busy.had.clear();
    for _ in 0..2_000 {
        busy.dispatch(|_| 1.0);
        let whose = busy.step(|_| 1.0);
        busy.state.ask(ask(whose, 0), now(&busy));
    }
    let ratio = busy.had[&0] / busy.had[&1];
    assert!((0.9..1.1).contains(&ratio), "{:?}", busy.had);
}

/// Returns the admitted transactions in order, as pairs of tenant and consumer; none of them ends.
fn order(state: &mut State, asks: impl IntoIterator<Item = AdmissionRequest>) -> Vec<(i32, i32)> {
    asks.into_iter().for_each(|ask| {
        state.ask(ask, Duration::ZERO);
    });
    state
        .dispatch(Duration::ZERO)
        .grants
        .iter()
        .map(|grant| (grant.tenant_id, grant.consumer_id))
        .collect()
}

#[test]
fn consumers_take_turns_and_one_at_its_cap_does_not_hold_up_others() {
    let mut state = State::new(host(5));
    state.set_caps(1, 7, Some(1), None, Duration::ZERO);
    let asks = [7, 7, 7, 8, 8, 9].map(|consumer_id| ask(1, consumer_id));
    assert_eq!(order(&mut state, asks), [(1, 7), (1, 8), (1, 9), (1, 8)]);
    assert_eq!(state.snapshot().waiting, 2);
}

#[test]
fn caps_of_a_tenant_leave_room_for_others() {
    let limits = TenantLimits {
        transactions_max: Some(3),
        connections_max: Some(2),
        ..TenantLimits::default()
    };
    let mut state = State::new(host(10));
    state.set_limits(1, 1, "a", &limits, Duration::ZERO);
    let asks = [1, 1, 1, 2].map(|tenant_id| ask(tenant_id, 1));
    assert_eq!(order(&mut state, asks), [(2, 1), (1, 1), (1, 1)]);
    assert!(state.is_crowded(1) && !state.is_crowded(2));
    assert!(!state.set_limits(1, 0, "a", &TenantLimits::default(), Duration::ZERO), "an older row");
    assert_eq!(order(&mut state, []), []);
    assert!(state.set_limits(1, 1, "a", &TenantLimits::default(), Duration::ZERO));
    assert_eq!(order(&mut state, []), [(1, 1)]);
}

#[test]
fn memory_is_waited_for_in_order_and_what_is_larger_than_all_of_it_runs_alone() {
    let mib = |ask: AdmissionRequest, mib: u64| AdmissionRequest { memory: mib << 20, ..ask };
    let mut state = State::new(HostBounds::new(10, 100 << 20));
    // The second tenant is next and has no room; a tenant behind it may take no memory before it.
    let asks = [
        mib(ask(1, 1), 60),
        mib(ask(2, 1), 80),
        mib(ask(1, 2), 30),
        AdmissionRequest { memory: 0, ..ask(3, 1) },
    ];
    asks.iter().take(1).for_each(|ask| {
        state.ask(*ask, Duration::ZERO);
    });
    let first = state.dispatch(Duration::ZERO).grants;
    assert_eq!(order(&mut state, asks[1..].iter().copied()), [(3, 1)]);
    assert!(state.is_crowded(9));
    state.end(&first[0], took(1.0), 1, Duration::ZERO);
    assert_eq!(order(&mut state, []), [(2, 1)]);
    let mut state = State::new(HostBounds::new(10, 100 << 20));
    state.ask(mib(ask(1, 1), 500), Duration::ZERO);
    let alone = state.dispatch(Duration::ZERO).grants;
    assert_eq!(order(&mut state, [mib(ask(2, 1), 1)]), []);
    state.end(&alone[0], took(1.0), 1, Duration::ZERO);
    assert_eq!(order(&mut state, [mib(ask(2, 1), 1)]), [(2, 1), (2, 1)]);
    assert_eq!(state.snapshot().memory_bytes_peak, 100 << 20);
}

#[test]
fn a_tenants_memory_holds_up_its_own_alone() {
    let limits = TenantLimits { memory_bytes_max: Some(100 << 20), ..TenantLimits::default() };
    let mut state = State::new(host(10));
    state.set_limits(1, 1, "a", &limits, Duration::ZERO);
    assert_eq!(
        order(&mut state, [1, 1, 2, 2].map(|tenant_id| ask(tenant_id, 1))),
        [(1, 1), (2, 1), (2, 1)]
    );
}

#[test]
fn rates_bound_the_batch_and_delay_the_next() {
    let limits = TenantLimits { messages_per_second: Some(10), ..TenantLimits::default() };
    let mut state = State::new(host(10));
    state.set_limits(1, 1, "a", &limits, Duration::ZERO);
    state.set_caps(1, 2, None, Some(4), Duration::ZERO);
    let many = |consumer_id| AdmissionRequest { messages: 64, ..ask(1, consumer_id) };
    state.ask(many(2), Duration::ZERO);
    state.ask(many(3), Duration::ZERO);
    let dispatched = state.dispatch(Duration::ZERO);
    assert_eq!(dispatched.grants.iter().map(|grant| grant.messages).collect::<Vec<_>>(), [4, 6]);
    state.ask(many(2), Duration::ZERO);
    assert_eq!(state.dispatch(Duration::ZERO).again_at, Some(Duration::from_millis(100)));
    // A transaction that brings no messages is not delayed.
    assert_eq!(order(&mut state, [AdmissionRequest { messages: 0, ..ask(1, 5) }]), [(1, 5)]);
    // Messages that were not settled are put back.
    state.end(&dispatched.grants[1], took(1.0), 1, Duration::ZERO);
    assert_eq!(
        state.dispatch(Duration::ZERO).again_at,
        Some(Duration::from_millis(250)),
        "the consumer's own rate"
    );
    let dispatched = state.dispatch(Duration::from_millis(250));
    assert_eq!((dispatched.grants[0].messages, dispatched.again_at), (1, None));
}

#[test]
fn the_last_places_are_for_tenants_that_run_nothing() {
    let mut state = State::new(host(32));
    assert_eq!(order(&mut state, (0..36).map(|_| ask(1, 1))).len(), 28);
    assert_eq!(order(&mut state, [ask(2, 1), ask(2, 1), ask(3, 1), ask(4, 1)]), [(3, 1), (4, 1)]);
    let snapshot = state.snapshot();
    // The other two of the four kept places are for tenants that are known to give them back soon.
    assert_eq!((snapshot.running, snapshot.waiting), (30, 10));
}

#[test]
fn spare_transactions_begin_where_nobody_waits() {
    let mut state = State::new(host(2));
    let spare = state.ask_spare(ask(1, 1), Duration::ZERO).expect("there is room");
    assert_eq!(order(&mut state, [ask(2, 1), ask(2, 1)]), [(2, 1)]);
    assert!(state.is_crowded(1));
    assert!(state.ask_spare(ask(3, 1), Duration::ZERO).is_none());
    state.end(&spare, took(1.0), 0, Duration::ZERO);
    assert_eq!(order(&mut state, []), [(2, 1)]);
}

#[test]
fn what_goes_first_goes_before_its_own_tenants() {
    let mut state = State::new(host(1));
    let running = {
        state.ask(ask(1, 1), Duration::ZERO);
        state.dispatch(Duration::ZERO).grants
    };
    let first = AdmissionRequest { class: Class::First, memory: 0, messages: 0, ..ask(1, 9) };
    order(&mut state, [ask(1, 1), ask(1, 2), ask(2, 1), first]);
    state.end(&running[0], took(1e6), 1, Duration::ZERO);
    let running = state.dispatch(Duration::ZERO).grants;
    assert_eq!(
        (running[0].tenant_id, running[0].consumer_id),
        (2, 1),
        "the other one has its share"
    );
    state.end(&running[0], took(1.0), 1, Duration::ZERO);
    assert_eq!(order(&mut state, []), [(1, 9)]);
}

// What could go wrong: a caller that stopped waiting keeps a place, before or after it was granted.
#[tokio::test(flavor = "multi_thread")]
async fn who_stops_waiting_leaves_nothing_behind() {
    let scheduler = Scheduler::new(host(3));
    let tasks: Vec<_> = (0..200_u64)
        .map(|n| {
            let scheduler = scheduler.clone();
            tokio::spawn(async move {
                let mut rng = StdRng::seed_from_u64(n);
                for _ in 0..100 {
                    let wait = Duration::from_micros(rng.random_range(0..500));
                    let admitted = tokio::time::timeout(
                        wait,
                        scheduler.admit(ask((n % 7) as i32, (n % 3) as i32)),
                    )
                    .await;
                    tokio::task::yield_now().await;
                    drop(admitted);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let snapshot = scheduler.snapshot();
    assert_eq!(
        (snapshot.running, snapshot.waiting, snapshot.memory_bytes),
        (0, 0, 0),
        "{snapshot:?}"
    );
    assert!(snapshot.running_peak == 3 && scheduler.lock().waiting.is_empty());
    assert!(scheduler.lock().state.is_at_rest());
}

#[tokio::test]
async fn the_clock_lets_in_what_a_rate_delayed_and_a_change_takes_effect() {
    let scheduler = Scheduler::new(host(3));
    let rated = |rate| TenantLimits { messages_per_second: rate, ..TenantLimits::default() };
    scheduler.set_limits(1, 1, "a", &rated(Some(10)));
    let started = tokio::time::Instant::now();
    for _ in 0..15 {
        scheduler.admit(ask(1, 1)).await.settled(1);
    }
    assert!(started.elapsed() >= Duration::from_millis(490), "{:?}", started.elapsed());
    scheduler.set_limits(1, 1, "a", &rated(Some(1)));
    scheduler.admit(ask(1, 1)).await.settled(1);
    let waiting = tokio::spawn({
        let scheduler: Arc<_> = scheduler.clone();
        async move { scheduler.admit(ask(1, 1)).await.settled(1) }
    });
    tokio::task::yield_now().await;
    assert_eq!(scheduler.snapshot().waiting, 1);
    scheduler.set_limits(1, 1, "a", &rated(None));
    tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap().unwrap();
}

/// Returns a host on which tenant 2 has as many transactions open as it gets, and waits for more.
fn seized(places: usize) -> (State, Vec<Grant>) {
    let mut state = State::new(host(places));
    // The victim was here before, and its transaction was dear: its clock is ahead of every other.
    state.ask(ask(1, 1), Duration::ZERO);
    let before = state.dispatch(Duration::ZERO).grants;
    (0..2 * places).for_each(|_| {
        state.ask(ask(2, 1), Duration::ZERO);
    });
    let mut held = state.dispatch(Duration::ZERO).grants;
    state.end(&before[0], took(1e6), 1, at(1));
    held.extend(state.dispatch(at(1)).grants);
    (state, held)
}

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

// What could go wrong: a tenant with slow handlers holds every place. A tenant that did much before
// is then refused what is kept for others (security finding 3).
#[test]
fn a_tenant_that_runs_nothing_finds_a_place_whatever_the_clocks() {
    for places in [8, 16, 32, 100] {
        let (mut state, held) = seized(places);
        assert!(held.len() < places, "{} of {places} places", held.len());
        for n in 0..50 {
            let now = at(10 + n * 20);
            state.ask(ask(1, 1), now);
            let grants = state.dispatch(now).grants;
            let whose: Vec<_> = grants.iter().map(|grant| grant.tenant_id).collect();
            assert_eq!(whose, [1], "{places} places, message {n}");
            state.end(&grants[0], took(2.0), 1, now + at(2));
        }
        assert_eq!(state.overtaken_max(1), 0);
    }
}

// What could go wrong: a transaction is charged only at its end, so that the tenant with the
// longest transactions is next.
#[test]
fn what_runs_is_charged_while_it_runs() {
    let mut state = State::new(host(2));
    state.ask(ask(1, 1), Duration::ZERO);
    state.ask(ask(2, 1), Duration::ZERO);
    let grants = state.dispatch(Duration::ZERO).grants;
    assert_eq!(grants.len(), 2);
    let (slow, fast): (Vec<_>, Vec<_>) = grants.into_iter().partition(|grant| grant.tenant_id == 2);
    // Both tenants wait for more. The one has paid 50 ms; the other's first transaction runs for 10
    // s.
    state.ask(ask(1, 1), at(50));
    state.ask(ask(2, 1), at(50));
    state.end(&fast[0], took(50.0), 1, at(10_000));
    let next: Vec<_> =
        state.dispatch(at(10_000)).grants.iter().map(|grant| grant.tenant_id).collect();
    assert_eq!(next, [1]);
    drop(slow);
}

/// Tenants with eight handlers each that take a minute, against a victim. The victim has a message
/// every 20 ms, each of which takes 5 ms.
struct Siege {
    state: State,
    now: u64,
    /// Time at which the state looked at again.
    again_at: Option<u64>,
    /// Running transactions, each with the time at which it ends by itself.
    running: Vec<(u64, Grant)>,
    /// Arrival of the victim's waiting message, with its place in the queue.
    waits: Option<(u64, u64)>,
    waited_ms: Vec<u64>,
}

const VICTIM: i32 = 1_000;
const SLOW_MS: u64 = 60_000;

impl Siege {
    fn new(places: usize) -> Self {
        Self {
            state: State::new(host(places)),
            now: 0,
            again_at: None,
            running: Vec::new(),
            waits: None,
            waited_ms: Vec::new(),
        }
    }

    fn attack(&mut self, tenants: i32) {
        for n in 0..8 * tenants {
            self.state.ask(ask(n % tenants, 1), at(self.now));
        }
    }

    /// Moves to the next moment at which something happens.
    fn step(&mut self) {
        let next_message = (self.now / 20 + 1) * 20;
        let running = self.running.iter().map(|(ends, _)| *ends);
        let ends = running.chain(self.again_at).chain([next_message]);
        self.now = ends.filter(|at| *at > self.now).min().expect("a message comes every 20 ms");
        let (ended, running): (Vec<_>, Vec<_>) =
            self.running.drain(..).partition(|(ends, _)| *ends <= self.now);
        self.running = running;
        for (_, grant) in ended {
            self.state.end(&grant, Usage { cpu: at(1), database: at(1) }, 1, at(self.now));
            if grant.tenant_id != VICTIM {
                self.state.ask(ask(grant.tenant_id, 1), at(self.now));
            }
        }
        if self.now.is_multiple_of(20)
            && self.waits.is_none()
            && !self.running.iter().any(|(_, grant)| grant.tenant_id == VICTIM)
        {
            self.waits = Some((self.now, self.state.ask(ask(VICTIM, 1), at(self.now))));
        }
        let dispatched = self.state.dispatch(at(self.now));
        self.again_at = dispatched.again_at.map(|at| at.as_millis() as u64);
        for id in dispatched.called_back {
            let called = self
                .running
                .iter_mut()
                .find(|(_, grant)| grant.id == id)
                .expect("what is called back runs");
            assert!(called.1.is_kept && called.1.tenant_id != VICTIM);
            called.0 = self.now + 3;
        }
        for grant in dispatched.grants {
            let takes = if grant.tenant_id == VICTIM { 5 } else { SLOW_MS };
            if let (VICTIM, Some((since, _))) = (grant.tenant_id, self.waits) {
                self.waited_ms.push(self.now - since);
                self.waits = None;
            }
            self.running.push((self.now + takes, grant));
        }
        assert!(self.running.len() <= 32);
    }

    fn run(&mut self, ms: u64) {
        let until = self.now + ms;
        while self.now < until {
            self.step();
        }
    }
}

// What could go wrong: four slow tenants more than the first fill what is kept. The next tenant
// then waits for as long as their handlers run (security finding 3, show 3).
#[test]
fn slow_tenants_however_many_hold_up_nobody() {
    for tenants in [1, 2, 4, 5, 28, 31, 33, 40, 100] {
        // A victim that is known beforehand never waits.
        let mut siege = Siege::new(32);
        siege.run(100);
        siege.attack(tenants);
        siege.run(SLOW_MS * 3);
        assert_eq!(siege.waited_ms.iter().max(), Some(&0), "{tenants} slow tenants");
        assert!(siege.waited_ms.len() >= 9_000, "{}", siege.waited_ms.len());
        // A victim that comes when everything is seized waits at most for the loans of those that
        // came before it.
        let mut siege = Siege::new(32);
        siege.attack(tenants);
        siege.run(SLOW_MS / 2);
        let first = siege.waited_ms.first().copied().expect("it was let in");
        let loans = 1 + u64::from(tenants.unsigned_abs()) / 2;
        assert!(
            first <= loans * 1_010,
            "{tenants} slow tenants: the first message waited {first} ms"
        );
        assert_eq!(siege.waited_ms[1..].iter().max(), Some(&0), "{tenants} slow tenants");
        let counts = siege.state.snapshot().tenants;
        assert_eq!(counts[&VICTIM].stopped, 0);
    }
}

// What could go wrong: handlers that began together end together at their deadlines. The work of
// each of them then, all at once, delays the statements of others (show 3 of the security
// findings). Or their places stay empty.
#[test]
fn transactions_of_slow_tenants_begin_apart() {
    const DEADLINE_MS: u64 = 5_000;
    for (places, tenants) in [(32, 28), (32, 5), (8, 7), (48, 42), (1, 1)] {
        let mut state = State::new(host(places));
        let free = places - places / 8;
        (0..free).for_each(|n| {
            state.ask(ask(n as i32 % tenants, 1), Duration::ZERO);
        });
        let grants = state.dispatch(Duration::ZERO).grants;
        assert_eq!(grants.len(), free);
        for grant in &grants {
            state.end(grant, took(1.0), 1, at(DEADLINE_MS));
            state.ask(ask(grant.tenant_id, 1), at(DEADLINE_MS));
        }
        let (mut now, mut begun) = (at(DEADLINE_MS), 0);
        while begun < free {
            let dispatched = state.dispatch(now);
            assert_eq!(dispatched.grants.len(), 1, "{tenants} tenants, {places} places, {now:?}");
            begun += 1;
            assert!(begun == free || dispatched.again_at.is_some());
            let next_at = dispatched.again_at.unwrap_or(now);
            // A tenant that is quick, or new, waits for none of them.
            state.ask(ask(VICTIM, 1), now);
            let dispatched = state.dispatch(now);
            assert!(
                dispatched
                    .grants
                    .iter()
                    .map(|grant| grant.tenant_id)
                    .eq((begun < free || places >= 8).then_some(VICTIM))
            );
            dispatched.grants.iter().for_each(|grant| state.end(grant, took(1.0), 1, now));
            now = next_at;
        }
        let within = now - at(DEADLINE_MS);
        assert!(
            within <= at(DEADLINE_MS / 2),
            "{tenants} tenants have {places} places after {within:?}"
        );
    }
}

// What could go wrong: while every other place is held for long, the partitions of a quick tenant
// wait for each other. Or its second transactions take the places of others' first ones.
#[test]
fn half_of_the_kept_places_take_a_second_transaction() {
    const PLACES: usize = 32;
    let mut state = State::new(host(PLACES));
    // These tenants are known to be quick.
    for tenant in 1..=4 {
        state.ask(ask(tenant, 1), Duration::ZERO);
        let grants = state.dispatch(Duration::ZERO).grants;
        state.end(&grants[0], took(1.0), 1, at(1));
    }
    let free = PLACES - PLACES / 8;
    assert_eq!(order(&mut state, (0..PLACES).map(|_| ask(9, 1))).len(), free);
    // Two partitions of one tenant, which has a third one; then the first transactions of the
    // others.
    assert_eq!(order(&mut state, (0..3).map(|_| ask(1, 1))), [(1, 1), (1, 1)]);
    assert_eq!(order(&mut state, [ask(2, 1), ask(2, 1)]), [(2, 1)], "half of them are taken");
    assert_eq!(order(&mut state, [ask(3, 1), ask(4, 1)]), [(3, 1)], "all of them are");
}

// What could go wrong: a transaction is stopped although no tenant waits. Or it is stopped twice.
#[test]
fn a_loan_ends_only_where_its_place_is_wanted() {
    let mut state = State::new(host(8));
    order(&mut state, (0..10).map(|_| ask(1, 1)));
    assert_eq!(order(&mut state, [ask(2, 1)]), [(2, 1)]);
    assert_eq!(state.dispatch(at(90_000)).called_back.len(), 0, "nobody that runs nothing waits");
    state.ask(ask(3, 1), at(90_000));
    let dispatched = state.dispatch(at(90_000));
    assert_eq!((dispatched.called_back.len(), dispatched.grants.len()), (1, 0));
    assert_eq!(state.dispatch(at(90_001)).called_back.len(), 0, "it was told");
    // A young loan ends by the clock.
    let mut state = State::new(host(8));
    order(&mut state, (0..10).map(|_| ask(1, 1)));
    order(&mut state, [ask(2, 1)]);
    state.ask(ask(3, 1), at(10));
    let dispatched = state.dispatch(at(10));
    assert_eq!((dispatched.called_back.len(), dispatched.again_at), (0, Some(at(1_000))));
    assert_eq!(state.dispatch(at(1_000)).called_back.len(), 1);
}

// What could go wrong: a tenant takes all memory, and the places that are left are of no use.
#[test]
fn memory_is_kept_as_places_are() {
    let dear = |tenant_id| AdmissionRequest { memory: 128 << 20, ..ask(tenant_id, 1) };
    let mut state = State::new(HostBounds::new(32, 1 << 30));
    let held = order(&mut state, (0..20).map(|_| dear(1)));
    assert_eq!(held.len(), 7, "an eighth of the memory is kept");
    state.ask(dear(2), Duration::ZERO);
    let lent = state.dispatch(Duration::ZERO).grants.pop().expect("what is kept is lent");
    assert_eq!((lent.tenant_id, state.snapshot().memory_bytes), (2, 1 << 30));
    // Memory is lent for no longer than a place.
    state.ask(dear(3), at(10));
    let dispatched = state.dispatch(at(10));
    assert_eq!(
        (dispatched.called_back.len(), dispatched.grants.len(), dispatched.again_at),
        (0, 0, Some(at(1_000)))
    );
    assert_eq!(state.dispatch(at(1_000)).called_back, [lent.id]);
    state.end(&lent, took(1.0), 0, at(1_003));
    let next: Vec<_> =
        state.dispatch(at(1_003)).grants.iter().map(|grant| grant.tenant_id).collect();
    assert_eq!(next, [3]);
}

// What could go wrong: a transaction of a known tenant is stopped, and a new tenant cannot have its
// place.
#[test]
fn a_new_tenant_takes_the_place_of_another_new_one() {
    let (mut state, _held) = seized(32);
    state.ask(ask(1, 1), at(10));
    let known = state.dispatch(at(10)).grants.pop().expect("it is known to be quick");
    for tenant_id in [3, 4, 5] {
        state.ask(ask(tenant_id, 1), at(20));
    }
    let trials: Vec<_> =
        state.dispatch(at(20)).grants.iter().map(|grant| (grant.id, grant.tenant_id)).collect();
    assert_eq!(trials.len(), 2, "half of what is kept");
    let called_back = state.dispatch(at(5_000)).called_back;
    assert!(
        called_back != [known.id] && trials.iter().any(|(id, _)| called_back == [*id]),
        "{called_back:?}"
    );
}

// What could go wrong: a tenant without limits of its own has the whole host. Or one that is alone
// has half of it.
#[test]
fn a_tenant_without_limits_has_its_part_where_there_are_others() {
    let bounds = HostBounds { tenant_transactions_max: Some(5), ..host(16) };
    let mut state = State::new(bounds);
    assert_eq!(order(&mut state, (0..20).map(|_| ask(1, 1))).len(), 14, "it is alone");
    let mut state = State::new(bounds);
    state.set_limits(
        2,
        1,
        "b",
        &TenantLimits { transactions_max: Some(9), ..TenantLimits::default() },
        Duration::ZERO,
    );
    assert_eq!(order(&mut state, (0..20).map(|_| ask(1, 1))).len(), 5);
    assert_eq!(order(&mut state, (0..20).map(|_| ask(2, 1))).len(), 9, "its own limit says so");
}

#[test]
fn the_lesser_of_the_hosts_and_the_tenants_deadline_holds() {
    let mut state = State::new(HostBounds { deadline_max: Some(at(500)), ..host(4) });
    let limited = |most| TenantLimits { deadline_ms_max: most, ..TenantLimits::default() };
    assert_eq!(state.deadline_max(1), Some(at(500)));
    state.set_limits(1, 1, "a", &limited(Some(200)), Duration::ZERO);
    state.set_limits(2, 1, "b", &limited(Some(900)), Duration::ZERO);
    assert_eq!((state.deadline_max(1), state.deadline_max(2)), (Some(at(200)), Some(at(500))));
}

// What could go wrong: a tenant sends where an operator has taken the right away, or where another
// tenant may.
#[test]
fn destinations_are_those_of_the_present_limits() {
    let mut state = State::new(host(4));
    let limited = |allowed: Option<&str>| TenantLimits {
        destinations_allowed: allowed.map(|allowed| vec![allowed.to_owned()]),
        ..TenantLimits::default()
    };
    assert!(state.destinations_allowed(1).is_empty(), "nothing is known of it");
    state.set_limits(1, 1, "a", &limited(Some("kafka:a.*")), Duration::ZERO);
    state.set_limits(2, 1, "b", &limited(None), Duration::ZERO);
    assert_eq!(*state.destinations_allowed(1), ["kafka:a.*".to_owned()]);
    assert!(state.destinations_allowed(2).is_empty());
    state.set_limits(1, 2, "a", &limited(None), Duration::ZERO);
    state.set_limits(1, 1, "a", &limited(Some("kafka:a.*")), Duration::ZERO);
    assert!(state.destinations_allowed(1).is_empty(), "an older row changes nothing");
}

// What could go wrong: a handler that is to stop goes on, or one of another consumer is stopped.
#[tokio::test]
async fn transactions_of_a_consumer_are_told_to_stop() {
    let scheduler = Scheduler::new(host(8));
    let (one, other) = (scheduler.admit(ask(1, 1)).await, scheduler.admit(ask(1, 2)).await);
    assert_eq!(scheduler.stop(1), 1);
    assert_eq!(scheduler.stop(1), 0, "it was told");
    assert_eq!(one.meter().stopped().await, Stopped::Withdrawn);
    assert!(futures::FutureExt::now_or_never(other.meter().stopped()).is_none());
    drop((one, other));
    assert_eq!(scheduler.snapshot().tenants[&1].stopped, 1);
    assert!(scheduler.lock().state.is_at_rest() && scheduler.lock().running.is_empty());
}
