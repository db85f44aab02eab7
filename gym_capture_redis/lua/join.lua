-- Makes sure that the rollout exists, and says which attempt it is.
-- Needed by a put that nobody announced: the put itself never creates a rollout, so that a delayed
-- duplicate of it cannot bring back one that was deleted. An empty open rollout reads like an unknown one.
-- 1  incarnation to give it if it is new
-- Reply    OK, names of the newest chain ends
-- Repeat   safe
local state, err = load_state()
if err then return err end
if not state then
  state = new_state(arg(1))
  write(state)
else
  keep(state)
end
return reply('OK', state, state.ends)
