//! RACE: reading comprehension, of which a BERT rates each option of a question by itself.
//!
//! Each choice is a row `[CLS] question and option [SEP] article [SEP]`, with segment 0 up to the first `[SEP]`. The
//! first part keeps at most 128 tokens, and the article what is left of the sequence. Attention leaves out padding.
//!
//! Source: Shoeybi et al., arXiv 1909.08053, section 5.3, and `tasks/race` of Megatron-LM.

mod article;

use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::{Batch, ChoiceBatch, FiniteSamples, Permutation, Samples, SentencePairs, TokenSource};
use ferrotron_tensor::{Error, RandomKey, Result};
use std::path::PathBuf;
use std::sync::Arc;

pub use article::{NUM_CHOICES, RaceArticle, RaceQuestion};

/// Tokens that a question keeps with its option, as in Megatron-LM.
const MAX_QA_LENGTH: usize = 128;

/// Tokenized questions, in the order of their files. Clones share them.
///
/// ```
/// use ferrotron_data::{FiniteSamples, Samples};
/// use ferrotron_data::tasks::{NUM_CHOICES, Race, RaceArticle, RaceQuestion};
/// use ferrotron_data::tokenizer::Tokenizer;
/// let choices = ["It is red.", "It is green.", "It is blue.", "It is wet."].map(String::from);
/// let questions = vec![RaceQuestion { choices, answer: 2 }];
/// let articles = [RaceArticle { text: "The sky is blue.".into(), questions }];
/// let race = Race::new(&articles, &Tokenizer::Byte, 64)?;
/// let batch = race.batch(0, 2)?; // the second one is blank
/// assert_eq!((race.len(), batch.rows()), (1, 2 * NUM_CHOICES));
/// assert_eq!(batch.get::<i64>("answers")?, [2, -100]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Race {
    set: Arc<Tokenized>,
    special: SpecialTokens,
    seq_length: usize,
    count: u64,
}

#[derive(Debug)]
struct Tokenized {
    /// The tokens of each article, as many as a row may have.
    articles: Vec<Vec<u32>>,
    questions: Vec<Question>,
}

#[derive(Debug)]
struct Question {
    article: usize,
    choices: [Vec<u32>; NUM_CHOICES],
    answer: usize,
}

impl Race {
    /// Reads files and folders, and tokenizes them for rows of `seq_length` positions.
    ///
    /// # Errors
    /// Errors of [`RaceArticle::read`] and [`Race::new`].
    pub fn open(paths: &[PathBuf], tokenizer: &Tokenizer, seq_length: usize) -> Result<Race> {
        Race::new(&RaceArticle::read(paths)?, tokenizer, seq_length)
    }

    /// Tokenizes the questions of `articles` for rows of `seq_length` positions.
    ///
    /// # Errors
    /// A sequence length below 5; no question; a tokenizer without BERT's tokens; as [`Tokenizer::encode`].
    pub fn new(articles: &[RaceArticle], tokenizer: &Tokenizer, seq_length: usize) -> Result<Race> {
        SentencePairs::check_length(seq_length)?;
        let special = tokenizer.special_tokens()?;
        let encode = |text: &str, most: usize| -> Result<Vec<u32>> {
            let mut tokens = tokenizer.encode(text)?;
            tokens.truncate(most);
            tokens.shrink_to_fit();
            Ok(tokens)
        };
        let mut set = Tokenized { articles: Vec::new(), questions: Vec::new() };
        for (number, article) in articles.iter().enumerate() {
            set.articles.push(encode(&article.text, seq_length)?);
            for question in &article.questions {
                let mut choices = [const { Vec::new() }; NUM_CHOICES];
                for (tokens, text) in choices.iter_mut().zip(&question.choices) {
                    *tokens = encode(text, MAX_QA_LENGTH)?;
                }
                set.questions.push(Question { article: number, choices, answer: question.answer });
            }
        }
        let count = set.questions.len() as u64;
        if count == 0 {
            return Err(Error::value("race", "there is no question"));
        }
        Ok(Race { set: Arc::new(set), special, seq_length, count })
    }

    /// The first `questions` questions, or all if there are fewer.
    #[must_use]
    pub fn first(self, questions: u64) -> Race {
        Race { count: self.count.min(questions), ..self }
    }

    /// Samples for training: each epoch takes each question once, in an order of its own that `seed` decides.
    pub fn shuffled(self, seed: u64) -> ShuffledRace {
        ShuffledRace { race: self, seed }
    }

    /// All tokens as a stream of a vocabulary of `vocab_size`, by which runs recognise their data: of each article, its
    /// text, and of each question, its choices and the right one once more.
    ///
    /// # Errors
    /// A token that is not below `vocab_size`.
    pub fn token_source(&self, vocab_size: usize) -> Result<TokenSource> {
        let Tokenized { articles, questions } = &*self.set;
        let of_question = |question: &Question| {
            let right = &question.choices[question.answer];
            question.choices.iter().chain([right]).flatten().copied().collect::<Vec<u32>>()
        };
        let tokens = articles.iter().flatten().copied();
        TokenSource::from_tokens(
            tokens.chain(questions.iter().flat_map(of_question)).collect(),
            vocab_size,
        )
    }

    fn blank(&self, first_sample: u64, questions: usize) -> ChoiceBatch {
        ChoiceBatch::blank(
            first_sample,
            [questions, NUM_CHOICES, self.seq_length],
            self.special.pad,
        )
    }

    /// Writes question `index` into the rows of sample `sample` of `batch`.
    fn fill(&self, batch: &mut ChoiceBatch, sample: usize, index: u64) {
        let Question { article, choices, answer } = &self.set.questions[index as usize];
        let SpecialTokens { cls, sep, .. } = self.special;
        for (row, choice) in (sample * NUM_CHOICES..).zip(choices) {
            let mut tokens = [&[cls], &choice[..], &[sep], &self.set.articles[*article]].concat();
            tokens.truncate(self.seq_length - 1);
            let second = tokens.len().min(choice.len() + 2);
            tokens.push(sep);
            let at = row * self.seq_length..row * self.seq_length + tokens.len();
            batch.tokens[at.clone()].copy_from_slice(&tokens);
            batch.segments[at][second..].fill(1);
            batch.lengths[row] = tokens.len();
        }
        batch.answers[sample] = *answer as i64;
    }
}

impl Samples for Race {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let mut batch = self.blank(first_sample, micro_batch);
        for (sample, index) in (first_sample..self.count).take(micro_batch).enumerate() {
            self.fill(&mut batch, sample, index);
        }
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }
}

impl FiniteSamples for Race {
    fn len(&self) -> u64 {
        self.count
    }
}

/// Questions for training, without an end.
#[derive(Debug, Clone)]
pub struct ShuffledRace {
    race: Race,
    seed: u64,
}

impl Samples for ShuffledRace {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let ShuffledRace { race, seed } = self;
        let mut batch = race.blank(first_sample, micro_batch);
        for (row, sample) in (first_sample..).take(micro_batch).enumerate() {
            let key = RandomKey::new(*seed, sample / race.count, "data.race.order");
            let index = Permutation::new(key, race.count).at(sample % race.count);
            race.fill(&mut batch, row, index);
        }
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        self.race.seq_length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn race(seq_length: usize) -> Race {
        let question = |choices: [&str; NUM_CHOICES], answer| RaceQuestion {
            choices: choices.map(String::from),
            answer,
        };
        let first = vec![question(["a", "bc", "", "defgh"], 1)];
        let second = vec![question(["i", "j", "k", "l"], 3), question(["m", "n", "o", "p"], 0)];
        let articles = [("xyz", first), ("", second)]
            .map(|(text, questions)| RaceArticle { text: text.into(), questions });
        Race::new(&articles, &Tokenizer::Byte, seq_length).unwrap()
    }

    /// The tokens of a row as text, with C, S and . for those that are added, and the segments.
    fn rows(batch: &Batch) -> Vec<(String, String)> {
        let special = Tokenizer::Byte.special_tokens().unwrap();
        let letter = |&token: &u32| match token {
            token if token == special.cls => 'C',
            token if token == special.sep => 'S',
            token if token == special.pad => '.',
            token => char::from(token as u8),
        };
        let length = batch.seq_length;
        let tokens = batch.get::<u32>("tokens").unwrap().chunks(length);
        let segments = batch.get::<u32>("segments").unwrap().chunks(length);
        let text = |segments: &[u32]| segments.iter().map(u32::to_string).collect::<String>();
        tokens
            .zip(segments)
            .map(|(tokens, segments)| (tokens.iter().map(letter).collect(), text(segments)))
            .collect()
    }

    /// Numbers computed by hand after the rule of Megatron-LM: cut to one token less than the length, then `[SEP]` with
    /// segment 1.
    #[test]
    fn a_row_is_the_choice_and_then_the_article_cut_to_the_length() {
        let batch = race(8).batch(0, 1).unwrap();
        let want = [
            ("CaSxyzS.", "00011110"),
            ("CbcSxyzS", "00001111"),
            ("CSxyzS..", "00111100"),
            ("CdefghSS", "00000001"),
        ];
        assert_eq!(rows(&batch), want.map(|(a, b)| (a.to_string(), b.to_string())));
        assert_eq!(batch.key_lengths(), Some(&[7, 8, 6, 8][..]));
        assert_eq!(batch.get::<i64>("answers").unwrap(), [1]);
        let short = rows(&race(5).batch(0, 1).unwrap());
        assert_eq!(short[0], ("CaSxS".into(), "00011".into()));
        assert_eq!(short[3], ("CdefS".into(), "00001".into()));
        assert!(race_error(4).contains("--seq-length: must be at least 5"));
    }

    fn race_error(seq_length: usize) -> String {
        Race::new(&[], &Tokenizer::Byte, seq_length).unwrap_err().to_string()
    }

    #[test]
    fn a_question_keeps_128_tokens() {
        let choices = [1, 128, 129, 300].map(|length| "q".repeat(length));
        let questions = vec![RaceQuestion { choices, answer: 0 }];
        let articles = [RaceArticle { text: "a".repeat(500), questions }];
        let batch = Race::new(&articles, &Tokenizer::Byte, 512).unwrap().batch(0, 1).unwrap();
        let kept = rows(&batch).iter().map(|(row, _)| row.matches('q').count()).collect::<Vec<_>>();
        assert_eq!(kept, [1, 128, 128, 128]);
        assert_eq!(batch.key_lengths(), Some(&[504, 512, 512, 512][..]));
    }

    #[test]
    fn an_epoch_has_each_question_once_and_beyond_the_last_nothing_counts() {
        let race = race(8);
        let training = race.clone().shuffled(5);
        for epoch in 0..4 {
            let batch = training.batch(3 * epoch, 3).unwrap();
            let mut answers = batch.get::<i64>("answers").unwrap().to_vec();
            answers.sort_unstable();
            assert_eq!(answers, [0, 1, 3]);
            let one = training.batch(3 * epoch + 1, 1).unwrap();
            assert_eq!(rows(&one), rows(&batch)[NUM_CHOICES..2 * NUM_CHOICES]);
        }
        assert_eq!((race.len(), race.clone().first(2).len()), (3, 2));
        let held_out = race.clone().first(2).batch(1, 2).unwrap();
        assert_eq!(held_out.get::<i64>("answers").unwrap(), [3, crate::IGNORE]);
        // Choices that are the same with another answer are other data.
        let tokens = race.token_source(260).unwrap();
        assert_eq!(tokens.len(), 3 + (8 + 2) + 2 * (4 + 1));
        assert!(race.token_source(99).is_err());
    }
}
