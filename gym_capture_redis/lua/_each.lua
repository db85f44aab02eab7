-- Runs the step on each entry of the call, in order, and answers with the list of their replies. Each entry
-- answers for itself. KEYS: the rollout of each. ARGV: two words about the server (see _rollout.lua), then of each
-- entry the number of its arguments, and these.
local replies, at = {}, 3
for number, rollout in ipairs(KEYS) do
  key, first = rollout, at
  replies[number] = step()
  at = at + ARGV[at] + 1
end
return replies
