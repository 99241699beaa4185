//! Answers that requests share, because each costs brokers or a database much.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Semaphore, watch},
    time::Instant,
};
use tokio_util::task::TaskTracker;

/// The last answers, by key. Requests for one key wait for one search together and share its answer
/// while it is fresh. A search goes on without its requests.
pub(crate) struct SharedAnswers<K, T, E> {
    last: Mutex<HashMap<K, LastAnswer<T, E>>>,
    places: Arc<Semaphore>,
    fresh: Duration,
    fresh_failure: Duration,
}

/// The answer to one key; none while a task searches for it. The channel is closed once that task
/// has ended, with an answer or without.
type LastAnswer<T, E> = watch::Receiver<Option<SharedAnswer<T, E>>>;

struct SharedAnswer<T, E> {
    result: Result<T, E>,
    fresh_until: Instant,
}

/// The search for an answer has ended without one: it panicked, or the process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the search for an answer ended without one")]
pub(crate) struct AnswerLost;

impl<K, T, E> SharedAnswers<K, T, E>
where
    K: Eq + Hash,
    T: Clone + Send + Sync + 'static,
    E: Clone + Send + Sync + 'static,
{
    /// Creates an empty store. From its end on, an answer is given for the time `fresh`, a failure
    /// for `fresh_failure`. At most `at_once` searches run at a time; further ones wait.
    pub(crate) fn new(at_once: usize, fresh: Duration, fresh_failure: Duration) -> Self {
        let places = Arc::new(Semaphore::new(at_once));
        Self { last: Mutex::default(), places, fresh, fresh_failure }
    }

    /// Returns the answer to a key: that of `search`, which becomes one of `tasks`, where the last
    /// one is not fresh and no search is under way. Forgets all answers that are not fresh.
    ///
    /// # Errors
    /// [`AnswerLost`] where the search ended without an answer. The next request begins a new one.
    pub(crate) async fn get(
        &self,
        tasks: &TaskTracker,
        key: K,
        search: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<Result<T, E>, AnswerLost> {
        let mut answer = {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            last.retain(|_, answer| is_current(answer));
            last.entry(key).or_insert_with(|| self.begin(tasks, search)).clone()
        };
        let found = answer.wait_for(Option::is_some).await.map_err(|_| AnswerLost)?;
        found.as_ref().map(|found| found.result.clone()).ok_or(AnswerLost)
    }

    /// Begins a search, and returns the place of its answer.
    fn begin(
        &self,
        tasks: &TaskTracker,
        search: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> LastAnswer<T, E> {
        let (sender, answer) = watch::channel(None);
        let places = self.places.clone();
        let (fresh, fresh_failure) = (self.fresh, self.fresh_failure);
        tasks.spawn(async move {
            let _place = places.acquire_owned().await;
            let result = search.await;
            let fresh = if result.is_ok() { fresh } else { fresh_failure };
            sender.send_replace(Some(SharedAnswer { result, fresh_until: Instant::now() + fresh }));
        });
        answer
    }
}

/// Returns whether an answer is fresh, or a search for it is under way.
fn is_current<T, E>(answer: &LastAnswer<T, E>) -> bool {
    // In this order, since a task sends its answer before its end.
    let is_under_way = answer.has_changed().is_ok();
    answer.borrow().as_ref().map_or(is_under_way, |found| Instant::now() < found.fresh_until)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use tokio::time::{sleep, timeout};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Answers that are fresh for five seconds, and failures that are for two. A search takes a
    /// second, and finds its own number.
    struct AnswersFixture {
        answers: SharedAnswers<usize, usize, usize>,
        tasks: TaskTracker,
        searches: Arc<AtomicUsize>,
        under_way: Arc<AtomicUsize>,
        under_way_max: Arc<AtomicUsize>,
    }

    impl AnswersFixture {
        fn new() -> Self {
            Self {
                answers: SharedAnswers::new(4, 5 * SECOND, 2 * SECOND),
                tasks: TaskTracker::new(),
                searches: Arc::default(),
                under_way: Arc::default(),
                under_way_max: Arc::default(),
            }
        }

        async fn ask(&self, key: usize) -> usize {
            self.answer(key, Ok).await.expect("no panic").expect("no failure")
        }

        async fn answer(
            &self,
            key: usize,
            end: fn(usize) -> Result<usize, usize>,
        ) -> Result<Result<usize, usize>, AnswerLost> {
            let (searches, under_way) = (self.searches.clone(), self.under_way.clone());
            let under_way_max = self.under_way_max.clone();
            let search = async move {
                let number = searches.fetch_add(1, Ordering::Relaxed) + 1;
                let now = under_way.fetch_add(1, Ordering::Relaxed) + 1;
                under_way_max.fetch_max(now, Ordering::Relaxed);
                sleep(SECOND).await;
                under_way.fetch_sub(1, Ordering::Relaxed);
                end(number)
            };
            self.answers.get(&self.tasks, key, search).await
        }

        fn searches(&self) -> usize {
            self.searches.load(Ordering::Relaxed)
        }

        fn known(&self) -> usize {
            self.answers.last.lock().expect("no panic while held").len()
        }
    }

    fn panics(_: usize) -> Result<usize, usize> {
        panic!("a search that fails");
    }

    // What could go wrong: each of many requests asks brokers or reads a database.
    #[tokio::test(start_paused = true)]
    async fn requests_at_once_share_one_search() {
        let fixture = AnswersFixture::new();
        assert_eq!(join_all((0..10).map(|_| fixture.ask(7))).await, [1; 10]);
        assert_eq!((fixture.searches(), fixture.ask(8).await), (1, 2), "another key has its own");
    }

    // What could go wrong: an answer is given for ever, or never twice.
    #[tokio::test(start_paused = true)]
    async fn an_answer_is_given_again_for_five_seconds_from_its_end() {
        let fixture = AnswersFixture::new();
        assert_eq!(fixture.ask(7).await, 1);
        sleep(5 * SECOND - Duration::from_millis(1)).await;
        assert_eq!(fixture.ask(7).await, 1);
        sleep(Duration::from_millis(1)).await;
        assert_eq!((fixture.ask(7).await, fixture.ask(7).await), (2, 2));
    }

    // What could go wrong: requests for many keys load brokers or databases without a bound.
    #[tokio::test(start_paused = true)]
    async fn four_searches_run_at_a_time() {
        let (fixture, began) = (AnswersFixture::new(), Instant::now());
        join_all((0..13).map(|key| fixture.ask(key))).await;
        assert_eq!((fixture.searches(), began.elapsed()), (13, 4 * SECOND));
        assert_eq!(fixture.under_way_max.load(Ordering::Relaxed), 4);
    }

    // What could go wrong: a client that gives up ends the search that others wait for, so that
    // none ever has an answer.
    #[tokio::test(start_paused = true)]
    async fn a_search_goes_on_without_its_request() {
        let fixture = AnswersFixture::new();
        assert!(timeout(SECOND / 2, fixture.ask(7)).await.is_err());
        // The second request waits for the rest of it.
        assert_eq!(timeout(SECOND * 3 / 4, fixture.ask(7)).await, Ok(1));
        assert!(timeout(SECOND / 2, fixture.ask(8)).await.is_err());
        sleep(SECOND).await;
        assert_eq!(timeout(Duration::from_millis(1), fixture.ask(8)).await, Ok(2));
        assert_eq!(fixture.searches(), 2);
    }

    // What could go wrong: a failure is given for as long as an answer, or not at all, so that
    // requests besiege what does not answer.
    #[tokio::test(start_paused = true)]
    async fn a_failure_is_given_again_for_its_own_time() {
        let fixture = AnswersFixture::new();
        assert_eq!(fixture.answer(7, Err).await, Ok(Err(1)));
        sleep(2 * SECOND - Duration::from_millis(1)).await;
        assert_eq!(fixture.answer(7, Ok).await, Ok(Err(1)));
        sleep(Duration::from_millis(1)).await;
        assert_eq!(fixture.answer(7, Ok).await, Ok(Ok(2)));
    }

    // What could go wrong: a search that panics keeps its key, or its place, for ever.
    #[tokio::test(start_paused = true)]
    async fn a_search_that_panics_blocks_nothing() {
        let fixture = AnswersFixture::new();
        let (one, other) = tokio::join!(fixture.answer(7, panics), fixture.answer(7, panics));
        assert_eq!((one, other, fixture.searches()), (Err(AnswerLost), Err(AnswerLost), 1));
        assert_eq!(join_all((0..5).map(|key| fixture.answer(key, panics))).await.len(), 5);
        assert_eq!((fixture.ask(7).await, fixture.known()), (7, 1));
    }

    // What could go wrong: an answer stays in memory for each key that was ever asked for, or goes
    // while requests wait for it.
    #[tokio::test(start_paused = true)]
    async fn answers_that_are_not_fresh_are_forgotten() {
        let fixture = AnswersFixture::new();
        join_all((0..4).map(|key| fixture.ask(key))).await;
        assert_eq!(fixture.known(), 4);
        sleep(5 * SECOND).await;
        join_all([7, 8, 9].map(|key| fixture.ask(key))).await;
        assert_eq!((fixture.known(), fixture.searches()), (3, 7));
    }
}
