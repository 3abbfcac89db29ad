//! The lines that `train` prints after the last step, by model.

use ferrotron::Result;
use ferrotron::models::data::TokenSource;
use ferrotron::models::entropy::bigram_entropy;
use ferrotron::models::evaluate::Evaluation;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::run::{RunResult, SetEvaluation, StopReason};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Trainer;

use super::output;
use super::sample::{one_rank_has_all, sample};

/// Evaluations of more tokens than this are not searched for their bigrams, which takes memory and
/// time of its own.
const BIGRAM_TOKENS: u64 = 10_000_000;

/// Prints the validation loss of a GPT, beside that of bigrams if the `evaluated` tokens lie one after another, and a sample
/// of `sample_length` tokens, which is returned.
pub fn gpt(
    trainer: &Trainer<Gpt>,
    evaluated: Option<&TokenSource>,
    tokenizer: &Tokenizer,
    outcome: &RunResult,
    (sample_length, stop): (usize, &StopFlag),
) -> Result<Option<String>> {
    let mut text = None;
    for SetEvaluation { set, evaluation } in &outcome.evaluations {
        let Evaluation { loss, tokens, .. } = evaluation;
        let counted = evaluated.filter(|_| *tokens < BIGRAM_TOKENS && !stop.is_set());
        output::report(&match (set, counted) {
            (Some(set), _) => format!("validation loss of {set} {loss:.4} over {tokens} tokens"),
            (None, Some(source)) => {
                // Those that were evaluated, and the one before them.
                let bigrams = bigram_entropy(&source.slice(0..tokens + 1)?.to_vec()?);
                format!(
                    "validation loss {loss:.4} (bigrams of the same {tokens} tokens: {bigrams:.4})"
                )
            }
            (None, None) => format!("validation loss {loss:.4} over {tokens} tokens"),
        });
    }
    if outcome.stop_reason == StopReason::Finished && sample_length > 0 && !stop.is_set() {
        let sharding = trainer.config().parallel.data_parallel.sharding;
        if one_rank_has_all(trainer.mesh().layout(), sharding) {
            text = sample(&trainer.parts()[0], tokenizer, sample_length, stop)?;
            text.iter().for_each(|text| output::report(&format!("sample: {text}")));
        } else {
            output::report("no sample: no rank has the whole model");
        }
    }
    let checkpoint = outcome.checkpoint.display();
    output::report(&format!(
        "continue a text: ferrotron generate --load {checkpoint} --prompt TEXT"
    ));
    Ok(text)
}

/// The loss of a GPT in words.
pub fn gpt_line(evaluation: &Evaluation) -> String {
    let Evaluation { loss, perplexity, tokens, .. } = evaluation;
    format!("loss {loss:.4} over {tokens} tokens (perplexity {perplexity:.2})")
}

/// Prints the validation losses of a BERT.
pub fn bert(outcome: &RunResult) {
    for SetEvaluation { set, evaluation } in &outcome.evaluations {
        let line = bert_line(evaluation);
        output::report(&match set {
            Some(set) => format!("validation of {set}: {line}"),
            None => format!("validation {line}"),
        });
    }
    output::report(&format!("checkpoint: {}", outcome.checkpoint.display()));
}

/// The losses of a BERT in words: those of pre-training, or of a task the loss and the accuracy.
pub fn bert_line(evaluation: &Evaluation) -> String {
    let Evaluation { loss, tokens, losses, .. } = evaluation;
    if let Some((_, accuracy)) = losses.iter().find(|(name, _)| *name == "accuracy") {
        return format!("accuracy {accuracy:.4}, loss {loss:.4} over {tokens} questions");
    }
    let terms = losses.iter().map(|(name, mean)| format!("{} {mean:.4}", name.replace('_', " ")));
    let terms: Vec<String> = terms.collect();
    format!("loss {loss:.4} over {tokens} masked tokens ({})", terms.join(", "))
}
